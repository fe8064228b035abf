"""`corral e2e list`, `validate` and `prepare` as a user runs them, in a project with cases of its own."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.e2e import listing
from corral.e2e.problems import problems, remarks
from corral.e2e.read import Found, find_cases, read_cases
from corral.errors import ConfigError

MINE: dict[str, Any] = {
    "name": "mine",
    "summary": "the training of this project",
    "tiers": ["weekly"],
    "topology": {"nodes": 2, "devices_per_node": 4},
    "source": "train",
    "script": "train.sh",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git work tree with a training script, and a folder for its cases."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, text in {"train.sh": "true\n", "more/helper.py": "", ".gitignore": "*.log\n", "out.log": ""}.items():
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_text(text)
    (tmp_path / "e2e").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add(project: Path, name: str = "mine", **changes: Any) -> Found:
    """A case file of the project; None as a change removes the key."""
    document = {key: value for key, value in {**MINE, "name": name, **changes}.items() if value is not None}
    file = project / "e2e" / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return Found(read_cases(file)[0], file)


# list ----------------------------------------------------------------------------------------------------------------


def test_list_names_tiers_topology_and_what_is_shown(project, capsys):
    add(project)
    assert listing.show(Namespace(tier=None, json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(maxsplit=3) == ["mine", "weekly", "2x4", "the training of this project"]
    assert [line.split()[0] for line in lines].count("two-node-ppo") == 1
    listing.show(Namespace(tier="weekly", json=False))
    assert capsys.readouterr().out.split()[0] == "mine"


def test_list_as_json_has_everything_a_case_says(project, capsys):
    found = add(project, retries=2)
    listing.show(Namespace(tier="weekly", json=True))
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed.pop("file"), listed.pop("shipped")) == (str(found.file), False)
    assert listed == found.case.model_dump(mode="json")
    assert listed["retries"] == 2


# validate ------------------------------------------------------------------------------------------------------------


def test_what_comes_with_corral_has_no_problems():
    for found in find_cases([], project=Path("/none")):
        assert (problems(found), remarks(found)) == ([], []), found.case.name


def test_a_good_case(project, capsys):
    add(project)
    assert listing.validate(Namespace(cases=["mine"])) == 0
    assert capsys.readouterr().out == "ok       mine\n"


def test_all_problems_of_all_files_are_told(project, capsys):
    add(project, "good")
    add(project, "bad", script="trian.sh", env={"LD_PRELOAD": "x"})
    (project / "e2e/torn.yaml").write_text("name: [")
    (project / "e2e/twin.yaml").write_text((project / "e2e/good.yaml").read_text())
    with pytest.raises(ConfigError, match=r"^3 of \d+ cases cannot run; see above$"):
        listing.validate(Namespace(cases=[]))
    lines = capsys.readouterr().out.splitlines()
    assert "ok       good" in lines
    assert "ok       two-node-ppo" in lines
    mine = [line for line in lines if line.startswith("problem")]
    assert mine[0].startswith("problem  bad: script trian.sh is not in the source ")
    assert mine[1].startswith("problem  bad: env LD_PRELOAD is refused: ")
    assert mine[2].startswith(f"problem  case {project}/e2e/torn.yaml is not YAML: ")
    twin = f"problem  {project}/e2e/twin.yaml: case 'good' is also in {project}/e2e/good.yaml; rename one"
    assert mine[3:] == [twin]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "../elsewhere"}, "source ../elsewhere leaves the project PROJECT"),
        ({"source": "nowhere"}, "source nowhere is no folder of the project PROJECT"),
        ({"script": "tran.sh"}, "script tran.sh is not in the source PROJECT/train; the nearest is train.sh"),
        ({"script": "helper.py"}, "script helper.py is not in the source PROJECT/train; the nearest is more/helper.py"),
        (
            {"script": "out.log"},
            "script out.log is there, but git ignores it or it is hidden; `git add -f out.log`",
        ),
        ({"paths": ["more"]}, "script train.sh is not in paths; add it"),
        ({"paths": ["train.sh", "mor/"]}, "paths: mor/ is not part of the source PROJECT/train"),
        (
            {"args": ["{mdel}"], "needs": {"model": {"path": "/tmp"}}},
            "args: {mdel} stands for nothing here; the nearest is {model}",
        ),
        ({"env": {"A": "{rollouts}"}}, "env: {rollouts} stands for nothing here; give rollouts: {steps: [1]}"),
        (
            {"args": ["a={rollouts}"], "rollouts": {"steps": [1]}},
            "args: {rollouts} stands for nothing here; it is known in env only",
        ),
        ({"args": ["a={run_dir}"]}, "args: {run_dir} stands for nothing here; it is known in env only"),
        ({"env": {"A": "{what}"}}, "env: {what} stands for nothing here; the nearest is {run_dir}"),
        (
            {"parity": {"args": ["{what}"], "env": {"B": "{why}"}}},
            "parity.args: {what} stands for nothing here",
        ),
        ({"command": ["echo", "{model}"], "script": None}, "command: {model} stands for nothing here"),
        (
            {"needs": {"data": {"make": ["x", "{out}", "{model}"]}}, "args": ["{data}"]},
            "needs.data: {model} stands for nothing here; the nearest is {out}",
        ),
        ({"env": {"A-B": "c"}}, "env name 'A-B' is not a variable name; use letters, digits and _"),
        ({"secrets": ["my token"]}, "secret name 'my token' is not a variable name; use letters, digits and _"),
        ({"secrets": ["A"], "env": {"A": "b"}}, "A is in env and in secrets; give it once"),
        ({"image": "a b"}, "image 'a b' does not match [A-Za-z0-9][A-Za-z0-9_.:/@-]{0,255}"),
        (
            {"expect": {"status": "TIMEOUT", "failing_rank": 8}},
            "expect.failing_rank: 8 is not one of the ranks 0 to 7 of the topology",
        ),
        (
            {"expect": {"cause": "hang"}},
            "expect.cause: a job that SUCCEEDED has none; give status: FAILED or TIMEOUT",
        ),
        ({"expect": {"exit_code": 3}}, "expect.exit_code: 3, and a job that SUCCEEDED has 0; give status: FAILED"),
        (
            {"expect": {"status": "FAILED"}, "parity": {"args": []}},
            "parity: a job that is expected to end FAILED has no results to compare",
        ),
        (
            {"expect": {"files": ["/etc/passwd"]}},
            "expect.files: /etc/passwd leaves the records; give a pattern relative to the run folder",
        ),
        (
            {"expect": {"files": ["a/../../b"]}},
            "expect.files: a/../../b leaves the records; give a pattern relative to the run folder",
        ),
        (
            {"expect": {"files": ["**x"]}},
            "expect.files: '**x' is no pattern of files: Invalid pattern: '**' can only be an entire path component",
        ),
        ({"expect": {"files": ["."]}}, "expect.files: '.' is no pattern of files: tuple index out of range"),
        ({"expect": {"ran": ["a"], "not_ran": ["a"]}}, "expect: a is in ran and in not_ran"),
    ],
)
def test_a_problem_is_one_line(project, changes, said):
    found = [line.replace(str(project), "PROJECT") for line in problems(add(project, **changes))]
    assert found[0] == said
    assert len(found) == (2 if "parity" in changes and "args" in changes["parity"] and changes["parity"]["args"] else 1)


def test_the_shell_s_braces_are_the_shell_s(project):
    words = ["bash", "-c", "echo ${HOME} ${data} {1..3} '{\"a\": 1}'"]
    assert problems(add(project, script=None, command=words)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"needs": {"m": {"path": "/none"}}, "args": ["{m}"]},
            "need m: /none is not on this machine; every node of the job has to have it",
        ),
        ({"needs": {"m": {"path": "/tmp"}}}, "need m is made and not used: no {m} in args, env or command"),
        (
            {"parity": {"args": []}},
            "parity compares metrics alone; with trainer.record_phases=full it finds where runs part",
        ),
        (
            {"expect": {"metrics": {"baseline": {"loss": {"rtol": 0.1}}}}},
            "no PROJECT/e2e/baselines/mine.json yet: run the case, then `corral e2e accept RESULT`",
        ),
    ],
)
def test_what_is_often_not_meant_is_noted_and_no_failure(project, capsys, changes, said):
    add(project, **changes)
    assert listing.validate(Namespace(cases=["mine"])) == 0
    out = capsys.readouterr().out.replace(str(project), "PROJECT")
    assert out == f"ok       mine\nnote     mine: {said}\n"


# prepare -------------------------------------------------------------------------------------------------------------


def test_prepare_makes_what_the_cases_need_and_says_where_it_lies(project, capsys):
    make = ["data", "arithmetic", "{out}", "--train", "8", "--test", "4"]
    add(project, needs={"data": {"make": make}, "base": {"path": str(project)}}, args=["{data}", "{base}"])
    arguments = Namespace(cases=[], tier="weekly", cache=project / "cache")
    assert listing.prepare(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "preparing data: corral data arithmetic {out} --train 8 --test 4"
    (folder,) = (project / "cache/e2e").glob("data-*[!k]")
    assert lines[-2:] == [f"mine: data {folder}", f"mine: base {project}"]
    listing.prepare(arguments)
    assert capsys.readouterr().out.splitlines() == lines[-2:]


def test_prepare_in_the_environment_s_cache(project, capsys, monkeypatch):
    monkeypatch.setenv("CORRAL_CACHE", str(project / "other"))
    add(project, needs={"data": {"make": ["data", "arithmetic", "{out}", "--train", "8", "--test", "4"]}})
    listing.prepare(Namespace(cases=["mine"], tier=None, cache=None))
    assert sorted(path.suffix for path in (project / "other/e2e").iterdir()) == ["", ".lock"]
    assert os.listdir(project / "other") == ["e2e"]
