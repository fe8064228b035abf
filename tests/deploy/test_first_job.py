"""docs/install.md from the token to the first job, with a Kubernetes of our own: the service as its manifests start it,
a client with a token, an operator, and nodes that are processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.manifests import the
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.containers import LightContainers
from tests.job.backends.kube.operator import OperatorSimulator

SPACE = "corral-jobs"
CORRAL = [sys.executable, "-m", "corral"]
NOISE = ("GITHUB_", "CORRAL_", "KUBE")
BOUND = 120.0


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube((SPACE,)) as kube, OperatorSimulator(kube, LightContainers(), SPACE):
        yield kube


@pytest.fixture
def env(tmp_path: Path, kube: FakeKube) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(NOISE)}
    paths = os.pathsep.join([str(Path(sys.executable).parent), base["PATH"]])
    return base | {"KUBECONFIG": str(kube.kubeconfig(tmp_path / "kubeconfig", namespace="elsewhere")), "PATH": paths}


@pytest.fixture
def service(tmp_path: Path, env: dict[str, str]) -> Iterator[str]:
    """The URL of one with the settings of the ConfigMap, but for where it lies and listens."""
    for name in ("config", "profiles"):
        (tmp_path / name).mkdir()
        for key, text in the("ConfigMap", f"corral-{name}")["data"].items():
            (tmp_path / name / key).write_text(text.replace("/etc/corral", str(tmp_path)))
    (tmp_path / "tokens").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["serve", "--config", str(tmp_path / "config/service.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--public-url", url, "--data-dir", str(tmp_path / "data"), "--agent-dir", str(tmp_path / "nodes")]
    token = subprocess.run(
        [*CORRAL, "serve", "--new-token", "me", "--token-file", str(tmp_path / "tokens/tokens.json")],
        env=env, capture_output=True, text=True, check=True, timeout=BOUND,
    ).stdout.strip()  # fmt: skip
    with (tmp_path / "service.log").open("wb") as log:
        process = subprocess.Popen([*CORRAL, *words], env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("corral serve: "), (tmp_path / "service.log").read_text()
        assert httpx.get(f"{url}/readyz").status_code == 200
        env |= {"CORRAL_URL": url, "CORRAL_TOKEN": token}
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=BOUND)


def submit(env: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CORRAL, "submit", "--source", str(folder), *words],
        env=env, capture_output=True, text=True, check=False, timeout=BOUND,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_from_the_token_to_its_verdict(service, env, kube, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    hello = ("--nodes", "2", "--devices", "2", "--", "python3", "-c", "print('hel' + 'lo')")
    shown = submit(env, source, "--dry-run", "-o", "yaml", *hello)
    assert shown.returncode == 0, shown.stderr
    assert "kind: RayJob" in shown.stdout
    assert f"namespace: {SPACE}" in shown.stdout
    assert kube.objects("rayjobs") == []
    stranger = submit({**env, "CORRAL_TOKEN": "corral_no"}, source, *hello)
    assert stranger.returncode == 77, stranger.stderr
    done = submit(env, source, *hello)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "service.log").read_text()[-4000:]
    assert "hello" in done.stdout.splitlines()
    assert "SUCCEEDED: exit code 0" in done.stderr
    for plural in ("rayjobs", "rayclusters", "pods", "secrets"):
        kube.wait(lambda plural=plural: kube.objects(plural) == [], 60)
