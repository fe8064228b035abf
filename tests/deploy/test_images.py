"""The Dockerfiles, read: what they copy is sent, what they install is pinned, and a cluster's `ray start` can run."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

import corral
from corral.job.backends.profile import SHIPPED, profile_of
from corral.job.service.settings import Settings

ROOT = Path(__file__).parents[2]
NODES = ["cpu", "cuda", "ascend"]
IMAGES = [*NODES, "service"]
TAGS = {"cpu": "cpu", "cuda": "gpu", "ascend": "ascend-a2"}


def parsed(name: str) -> DockerfileParser:
    text = (ROOT / f"docker/Dockerfile.{name}").read_bytes()
    return DockerfileParser(fileobj=io.BytesIO(text))


def lines(name: str, *instructions: str) -> list[str]:
    return [each["value"] for each in parsed(name).structure if each["instruction"] in instructions]


def last_stage(name: str) -> list[dict[str, Any]]:
    every = parsed(name).structure
    return every[max(index for index, each in enumerate(every) if each["instruction"] == "FROM") :]


def pins() -> dict[str, str]:
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {name.lower(): version.strip() for name, version in pairs}


@pytest.mark.parametrize("name", IMAGES)
def test_it_runs_as_a_user_without_rights_and_has_no_check_of_its_own(name):
    last = {each["instruction"]: each["value"] for each in last_stage(name)}
    assert last["USER"] == "1000:1000"
    assert last["HEALTHCHECK"] == "NONE"
    for part in ("RUN", "COPY", "USER"):
        assert part in last
    users = [each["instruction"] for each in last_stage(name)]
    assert "RUN" not in users[users.index("USER") :]


@pytest.mark.parametrize("name", NODES)
def test_a_node_starts_what_the_cluster_says(name):
    last = {each["instruction"]: each["value"] for each in last_stage(name)}
    assert json.loads(last["ENTRYPOINT"]) == []
    assert json.loads(last["CMD"]) == ["bash"]
    assert any("[train,cluster]" in line for line in lines(name, "RUN"))


def test_the_service_starts_by_itself():
    last = {each["instruction"]: each["value"] for each in last_stage("service")}
    assert json.loads(last["ENTRYPOINT"]) == ["corral"]
    assert not any("[train" in line or "torch" in line for line in lines("service", "RUN"))


@pytest.mark.parametrize("name", IMAGES)
def test_versions_are_those_that_are_tested(name):
    known = pins()
    labels = " ".join(lines(name, "LABEL"))
    assert f'org.opencontainers.image.version="{corral.__version__}"' in labels
    for package in ("ray", "torch"):
        for version in re.findall(rf'dev\.corral\.{package}="([^"]+)"', labels):
            assert version == known[package]
    installs = [line for line in lines(name, "RUN") if "pip install" in line]
    assert installs
    for line in installs:
        assert re.search(r"-c (/wheels/)?constraints\.txt ", line), line
        for package, version in re.findall(r"\b([a-z-]+)==([\w.]+)", line):
            assert version == known.get(package, known["torch"])  # torch-npu has the version of its torch


@pytest.mark.parametrize("name", IMAGES)
def test_shell_lines_are_shell_and_nothing_is_fetched_but_packages(name):
    for line in lines(name, "RUN"):
        assert subprocess.run(["bash", "-n"], input=line, text=True, check=False).returncode == 0, line
        words = shlex.split(line)
        assert not {"git", "curl"} & set(words), line
        assert "wget" not in words or "apt-get" in words


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_sent(name):
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for line in lines(name, "COPY"):
        if line.startswith("--from"):
            continue
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in sent, source


def test_all_that_a_wheel_is_made_of_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(lines("cpu", "COPY")[0].split()) >= {project["project"]["readme"], *project["project"]["license-files"]}
    folders = {
        pattern.split("/")[0] for each in project["tool"]["setuptools"]["data-files"].values() for pattern in each
    }
    assert {"corral", *folders} <= {source for line in lines("cpu", "COPY") for source in line.split()[:-1]}


@pytest.mark.parametrize("name", NODES)
def test_profiles_fit_the_image_and_its_user(name, tmp_path):
    found = profile_of(TAGS[name], "auto", Settings(data_dir=tmp_path))
    assert found.image == "", "an image has a registry, which only a cluster's own settings know"
    assert f"-t corral:{name} ." in (ROOT / f"docker/Dockerfile.{name}").read_text()
    assert found.ray_version == pins()["ray"]
    assert str(found.run_as_user) == lines(name, "USER")[-1].split(":")[0]


def test_profiles_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["corral.job.backends"]
    assert {path.name for path in SHIPPED.glob("*.yaml")} == {
        path.name for pattern in patterns for path in SHIPPED.parent.glob(pattern)
    }


@pytest.mark.parametrize("options", [[], ["-eu", "-o", "pipefail"]])
def test_every_bash_of_the_ascend_image_has_cann_s_environment_once(options, tmp_path):
    cann = tmp_path / "set_env.sh"
    cann.write_text('export LD_LIBRARY_PATH="/cann:${LD_LIBRARY_PATH}"\nfalse\n')
    env = {"PATH": os.environ["PATH"], "CANN_ENV": str(cann), "BASH_ENV": str(ROOT / "docker/ascend_env.sh")}
    shown = 'echo "$LD_LIBRARY_PATH"; bash -c \'echo "$LD_LIBRARY_PATH"\'; [[ $- == *u* ]] && echo strict || true'
    done = subprocess.run(
        ["bash", *options, "-c", shown], env=env, capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["/cann:", "/cann:", *(["strict"] if options else [])]


# Built here, as far as pip goes ---------------------------------------------------------------------------------------


def run_in(root: Path, name: str, python: Path) -> None:
    """The COPY and pip lines of a Dockerfile, with its folders below `root` and its Python in a venv."""
    build, wheels = root / "build", root / "wheels"
    build.mkdir()
    for source in {source for line in lines(name, "COPY") if "--from" not in line for source in line.split()[:-1]}:
        place = build / Path(source).name
        ignore = shutil.ignore_patterns("__pycache__")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=ignore)
        else:
            shutil.copy(ROOT / source, place)
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    env = {key: value for key, value in env.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for line in (line for line in lines(name, "RUN") if " pip " in line):
        wheels.mkdir(exist_ok=True)
        shutil.copy(ROOT / "constraints.txt", wheels)
        command = line.replace("/wheels", str(wheels))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=build, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(params=["service", "cpu"])
def installed(request, tmp_path):
    """A venv with what an image has."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin/python3"
    run_in(tmp_path, request.param, python)
    yield request.param, python
    shutil.rmtree(venv)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_pip_installs_works(installed, tmp_path):
    name, python = installed
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(elsewhere)}

    def answer(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False, timeout=300)

    assert answer("corral", "--version").stdout.split()[-1] == corral.__version__
    checked = answer("corral", "doctor", "--kind", "cpu", "--disk-mib", "1")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    agent = answer(str(python), "-c", "import corral.job.agent.join, sys; print('torch' in sys.modules)")
    assert agent.stdout == "False\n", agent.stderr
    assert answer(str(python), "-m", "pip", "check").returncode == 0
    if name == "service":
        assert answer(str(python), "-c", "import torch").returncode == 1
        assert answer("corral", "serve", "--print-openapi").returncode == 0
        assert answer(str(python), "-c", "import corral.job.backends.kuberay.backend").returncode == 0
    else:
        assert answer("ray", "--version").stdout.split()[-1] == pins()["ray"]
        ready = "from ray.dashboard import optional_deps; import torch, transformers; print('ready')"
        assert answer(str(python), "-c", ready).stdout == "ready\n"
