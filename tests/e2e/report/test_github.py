from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.e2e.case import Case
from corral.e2e.report import github
from corral.e2e.report.github import announce, match_tracebacks
from corral.e2e.result import Result
from corral.job.client.github import SUMMARY_LIMIT
from tests.e2e.report.made import ERROR, EVIL, TRACEBACK, check, crashed, diverged, passed, records


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of a step whose workspace is a checkout with one file of the source."""
    workspace = tmp_path / "checkout"
    (workspace / "rewards").mkdir(parents=True)
    (workspace / "rewards/length_reward.py").write_text("\n" * 50)
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": f"{workspace}",
        "GITHUB_STEP_SUMMARY": f"{tmp_path / 'summary.md'}",
        "GITHUB_OUTPUT": f"{tmp_path / 'output'}",
        "RUNNER_TEMP": f"{tmp_path}",
    }


def printed(result: Result, folder: Path, env: dict[str, str], capsys: Any) -> list[str]:
    announce(result, folder, env)
    return capsys.readouterr().out.splitlines()


def test_nothing_outside_actions(tmp_path, env, capsys):
    outside = {name: value for name, value in env.items() if name != "GITHUB_ACTIONS"}
    assert printed(crashed(), tmp_path, outside, capsys) == []
    match_tracebacks(outside)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "summary.md").exists()


def test_a_passed_run_prints_nothing_and_leaves_a_summary(tmp_path, env, capsys):
    records(tmp_path)
    assert printed(passed(), tmp_path, env, capsys) == []
    assert "2 of 2 expectations hold" in (tmp_path / "summary.md").read_text()
    output = (tmp_path / "output").read_text()
    values = dict(re.findall(r"^(\w+)<<(?:\S+)\n(.*)$", output, re.M))
    assert values == {
        "verdict": "PASSED",
        "result": f"{tmp_path / 'result.json'}",
        "report": f"{tmp_path / 'report.html'}",
    }


def test_an_error_at_the_line_of_the_source_that_the_traceback_names(tmp_path, env, capsys):
    records(tmp_path)
    assert printed(crashed(), tmp_path, env, capsys) == [
        f"::error file=rewards/length_reward.py,line=41,title=two-node-ppo%2C node-1/rank-5::{ERROR}"
    ]


def test_paths_are_those_of_the_repository_when_the_source_is_a_folder_of_it(tmp_path, env, capsys):
    records(tmp_path)
    workspace = tmp_path / "checkout"
    (workspace / ".git").mkdir()
    (workspace / "training").mkdir()
    (workspace / "rewards").rename(workspace / "training/rewards")
    case = Case(name="c", summary="s", command=["x"], source="training")
    said = {"case": case.model_dump(mode="json"), "file": f"{workspace / 'e2e/c.yaml'}"}
    (tmp_path / "case.json").write_text(json.dumps(said))
    (line,) = printed(crashed(), tmp_path, env, capsys)
    assert line.startswith("::error file=training/rewards/length_reward.py,line=41,")


def test_files_outside_the_source_are_no_places(tmp_path, env, capsys):
    records(tmp_path)
    (tmp_path / "checkout/rewards/length_reward.py").unlink()
    bad = check(ok=False, file="../../etc/passwd", line=1)
    reason = f"rank 5 on node-1: {ERROR}; exit code 1"
    assert printed(crashed(checks=[bad]), tmp_path, env, capsys) == [f"::error title=two-node-ppo::{reason}"]


def test_a_place_that_a_check_names_comes_first_and_each_place_once(tmp_path, env, capsys):
    records(tmp_path)
    (tmp_path / "checkout/train.py").write_text("")
    named = [check(ok=False, file="train.py", line=3), check(ok=False, file="rewards/length_reward.py", line=41)]
    shown = printed(crashed(checks=named), tmp_path, env, capsys)
    assert [re.findall(r"file=([^,]*),line=(\d+)", line)[0] for line in shown] == [
        ("train.py", "3"),
        ("rewards/length_reward.py", "41"),
    ]


def test_at_most_ten(tmp_path, env, capsys):
    named = [check(ok=False, file="rewards/length_reward.py", line=line) for line in range(1, 40)]
    assert len(printed(crashed(checks=named), tmp_path, env, capsys)) == 10


def test_a_parity_failure_without_a_place(tmp_path, env, capsys):
    result = diverged()
    assert printed(result, tmp_path, env, capsys) == [f"::error title=two-node-ppo::{result.reason}"]


def test_hostile_text_gives_no_command_of_its_own(tmp_path, env, capsys):
    hostile = f"{EVIL}\n::set-env name=A::b\n##[add-path]/x\r::error::y"
    log = tmp_path / "job/logs/node-1/rank-5.log"
    records(tmp_path, text=hostile)
    log.write_text(TRACEBACK.replace(ERROR, f"ValueError: {hostile}"), errors="replace")
    for line in printed(crashed(case=hostile, reason=hostile), tmp_path, env, capsys):
        assert re.match(r"::error (file=rewards/length_reward\.py,line=41,)?title=", line)
        assert "##[" not in line


def test_the_summary_stays_within_its_limit(tmp_path, env, capsys):
    summary = tmp_path / "summary.md"
    for before in (SUMMARY_LIMIT - 10_000, SUMMARY_LIMIT - 100, SUMMARY_LIMIT):
        summary.write_bytes(b"x" * before)
        checks = [check(f"{i}" * 300, ok=False) for i in range(100)]
        announce(crashed(checks=checks), tmp_path, env)
        assert summary.stat().st_size <= SUMMARY_LIMIT
        assert ("❌" in summary.read_text()) == (before == SUMMARY_LIMIT - 10_000)


def test_the_matcher_is_given_to_the_runner_where_it_can_read_it(tmp_path, env, capsys):
    match_tracebacks(env)
    (line,) = capsys.readouterr().out.splitlines()
    file = Path(line.removeprefix("::add-matcher::"))
    assert file.parent == tmp_path
    owners = [matcher["owner"] for matcher in json.loads(file.read_text())["problemMatcher"]]
    assert len(set(owners)) == len(owners) == 2


def matched(output: str) -> list[tuple[str, str, str]]:
    """(file, line, message) that the runner finds: the patterns of a matcher one line after the other."""
    document = json.loads((Path(github.__file__).parent / "problem-matcher.json").read_text())
    lines = output.splitlines()
    found = []
    for matcher in document["problemMatcher"]:
        patterns = matcher["pattern"]
        for at in range(len(lines) - len(patterns) + 1):
            hits = [re.search(pattern["regexp"], lines[at + n]) for n, pattern in enumerate(patterns)]
            if all(hits):
                named = {
                    key: hit[pattern[key]]
                    for pattern, hit in zip(patterns, hits, strict=True)
                    for key in ("file", "line", "message")
                    if key in pattern
                }
                found.append((named["file"], named["line"], named["message"]))
    return found


@pytest.mark.parametrize("prefix", ["", "[node-1 rank-5] "])
@pytest.mark.parametrize("code", ["value = 1 / 0", "raise ValueError('no')", "missing(1, 2)"])
def test_the_matcher_finds_the_innermost_frame_of_a_real_traceback(tmp_path, code, prefix):
    script = tmp_path / "script.py"
    script.write_text(f"def inner():\n    {code}\n\n\ndef outer():\n    inner()\n\n\nouter()\n")
    ran = subprocess.run([sys.executable, f"{script}"], capture_output=True, text=True, timeout=60)
    output = "".join(f"{prefix}{line}\n" for line in ran.stderr.splitlines())
    assert matched(output) == [(f"{script}", "2", ran.stderr.splitlines()[-1])]
