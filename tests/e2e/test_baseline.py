"""Baselines: a change nobody asked for is red, one that is wanted is one command and a diff away."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from corral.cli import main
from corral.e2e.baseline import baseline_checks, baseline_file, difference
from corral.e2e.case import Tolerance
from corral.e2e.read import find_cases
from corral.e2e.result import Check, JobPart, Result

LOSS, LENGTH = "actor/pg_loss", "response_length/mean"
ROWS = [{"step": 1, LOSS: -0.25, LENGTH: 33.5}, {"step": 2, LOSS: 0.125, LENGTH: 34.0}]
CASE = {
    "name": "small",
    "summary": "a small program",
    "command": ["python", "program.py"],
    "expect": {"metrics": {"baseline": {LOSS: {"rtol": 1e-6}, LENGTH: {"atol": 0.5}}}},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one case, under e2e/."""
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "small.yaml").write_text(yaml.safe_dump(CASE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def leave(project: Path) -> Callable[..., Path]:
    """Makes the folder of a run that measured `rows`, judged by its baseline, and returns it."""

    def make(
        rows: list[dict[str, Any]],
        name: str = "run",
        *,
        checks: tuple[Check, ...] = (),
        file: Path | None = None,
        **fields: Any,
    ) -> Path:
        folder = project / "runs" / name
        (folder / "job").mkdir(parents=True)
        (folder / "job" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        judged = [*checks, *checks_of(folder)]
        job = JobPart(job_id="j", url="u", command=["c"], nodes=1, devices_per_node=1, verdict={}, records="job")
        known: dict[str, Any] = {
            "case": "small",
            "summary": "a small program",
            "status": "PASSED" if all(check.ok for check in judged) else "FAILED",
            "reason": next((str(check) for check in judged if not check.ok), ""),
            "exit_code": 0,
            "started": 0.0,
            "seconds": 1.0,
            "where": "local",
            "corral": "0.1",
            "commit": "abc123",
            "checks": judged,
            "job": job,
        }
        Result(**{**known, **fields}).write(folder)
        (folder / "case.json").write_text(json.dumps({"file": str(file or project / "e2e" / "small.yaml")}))
        return folder

    return make


def checks_of(run: Path) -> list[Check]:
    (found,) = find_cases(["small"])
    return baseline_checks(found, run / "job")


def changed(step: int, **values: Any) -> list[dict[str, Any]]:
    """ROWS with some metrics of one step set (loss, length); None takes them away."""
    names = {"loss": LOSS, "length": LENGTH}
    rows = [dict(row) for row in ROWS]
    for key, value in values.items():
        rows[step - 1][names[key]] = value
        if value is None:
            del rows[step - 1][names[key]]
    return rows


def words(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.found for check in checks if not check.ok}


def refused(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    """The one line of an accept that takes nothing."""
    assert main(["e2e", "accept", str(run)]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_case_without_a_baseline_says_how_to_take_one(leave, capsys):
    run = leave(ROWS)
    (check,) = checks_of(run)
    assert not check.ok
    assert "`corral e2e accept RESULT`" in check.found
    assert main(["e2e", "accept", str(run)]) == 0
    assert all(check.ok for check in checks_of(run))
    assert "e2e/baselines/small.json is written: commit it" in capsys.readouterr().out


def test_an_unintended_change_is_red_and_an_intended_one_is_a_command_and_a_diff(leave, project, capsys):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    assert main(["e2e", "accept", str(leave(ROWS))]) == 0
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "e2e"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "baseline"], check=True)
    capsys.readouterr()

    other = leave(changed(2, loss=0.15), "other", commit="def456")
    assert words(checks_of(other)) == {LOSS: "step 2: 0.15, baseline 0.125 (+20 %)"}

    assert main(["e2e", "accept", str(other / "result.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "`git diff -- e2e/baselines/small.json`" in out[-1]
    assert [line.split() for line in out[:2]] == [
        ["step", "metric", "old", "new", "change"],
        ["2", LOSS, "0.125", "0.15", "+20", "%"],
    ]
    diff = subprocess.run([*git, "diff", "-U0"], check=True, capture_output=True, text=True).stdout
    lines = {line.strip() for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")}
    assert {line.replace(" ", "") for line in lines} == {
        '-"2":0.125',
        '+"2":0.15',
        '-"commit":"abc123",',
        '+"commit":"def456",',
    }
    assert words(checks_of(other)) == {}
    assert words(checks_of(project / "runs" / "run")) == {LOSS: "step 2: 0.125, baseline 0.15 (-16.7 %)"}


def test_within_the_tolerance_is_green_and_accepting_equal_values_writes_nothing(leave, capsys):
    run = leave(ROWS)
    assert main(["e2e", "accept", str(run)]) == 0
    (found,) = find_cases(["small"])
    before = baseline_file(found).stat().st_mtime_ns
    assert words(checks_of(leave(changed(1, length=33.9), "near"))) == {}
    assert set(words(checks_of(leave(changed(1, length=34.1), "far")))) == {LENGTH}
    capsys.readouterr()
    assert main(["e2e", "accept", str(leave(ROWS, "again", commit="later"))]) == 0
    assert "stays as it is" in capsys.readouterr().out
    assert baseline_file(found).stat().st_mtime_ns == before


def test_a_dry_run_only_shows(leave, project, capsys):
    assert main(["e2e", "accept", str(leave(ROWS)), "--dry-run"]) == 0
    assert LOSS in capsys.readouterr().out
    assert not (project / "e2e" / "baselines").exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS[:1], {LOSS: "step 2: nothing, baseline 0.125", LENGTH: "step 2: nothing, baseline 34.0"}),
        (
            [*ROWS, {"step": 3, LOSS: 1.5}],
            {LOSS: "step 3: 1.5, the baseline has no such step"},
        ),
        (changed(1, loss=float("nan")), {LOSS: "step 1: nan, baseline -0.25 (no number)"}),
        (changed(1, loss=float("inf")), {LOSS: "step 1: inf, baseline -0.25 (no number)"}),
        (changed(1, loss=None), {LOSS: "step 1: nothing, baseline -0.25"}),
        (
            changed(1, loss=1.0)[:1] + changed(2, loss=1.0)[1:],
            {LOSS: "step 1: 1.0, baseline -0.25 (+500 %), and 1 of 2 steps more"},
        ),
        (
            [{"step": k, LENGTH: ROWS[k - 1][LENGTH], "actor/pg_los": 1.0} for k in (1, 2)],
            {LOSS: "nothing; the nearest is 'actor/pg_los'"},
        ),
        ([], {LOSS: "nothing", LENGTH: "nothing"}),
    ],
)
def test_what_is_red(leave, rows, expected):
    assert main(["e2e", "accept", str(leave(ROWS))]) == 0
    assert words(checks_of(leave(rows, "other"))) == expected


def test_all_steps_that_differ_are_in_the_detail(leave):
    assert main(["e2e", "accept", str(leave(ROWS))]) == 0
    rows = [{**row, LOSS: 7.0} for row in ROWS]
    (check,) = [check for check in checks_of(leave(rows, "other")) if not check.ok]
    assert [line.split(":")[0] for line in check.detail.splitlines()[:2]] == ["step 1", "step 2"]
    assert "corral e2e accept RESULT" in check.detail


def test_records_that_are_missing_or_torn(leave):
    run = leave(ROWS)
    assert main(["e2e", "accept", str(run)]) == 0
    (run / "job" / "metrics.jsonl").write_text('{"step": 1')
    assert words(checks_of(run)) == {"metrics.jsonl": "line 1 is not a JSON object"}
    (run / "job" / "metrics.jsonl").unlink()
    assert words(checks_of(run)) == {"metrics.jsonl": "no such file"}


def test_a_metric_the_baseline_does_not_know(leave, project):
    assert main(["e2e", "accept", str(leave(ROWS))]) == 0
    file = project / "e2e" / "baselines" / "small.json"
    document = json.loads(file.read_text())
    del document["metrics"][LENGTH]
    file.write_text(json.dumps(document))
    (found,) = words(checks_of(project / "runs" / "run")).values()
    assert found == "none in small.json; take it with `corral e2e accept RESULT`"


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"metrics": {"a": {"1": NaN}}}', "{}"])
def test_a_damaged_baseline_is_red_and_not_replaced(leave, project, capsys, text):
    run = leave(ROWS)
    file = project / "e2e" / "baselines" / "small.json"
    file.parent.mkdir()
    file.write_text(text)
    (check,) = checks_of(run)
    assert not check.ok
    assert "no baseline" in check.found
    assert str(file) in refused(capsys, run)
    assert file.read_text() == text


def broken(group: str = "run", **fields: Any) -> Check:
    return Check(**{"group": group, "name": "status", "expected": "x", "found": "y", "ok": False, **fields})


@pytest.mark.parametrize(
    ("rows", "fields", "says"),
    [
        (ROWS, {"checks": (broken(),)}, "for another reason than its baseline (status: expected x, found y)"),
        (ROWS, {"checks": (broken("parity"),)}, "another reason"),
        (ROWS, {"status": "TIMEOUT", "reason": "run deadline"}, "small TIMEOUT for another reason"),
        (ROWS, {"status": "INTERRUPTED", "reason": "Ctrl-C"}, "INTERRUPTED"),
        (ROWS, {"job": None}, "no job"),
        (changed(2, loss=float("nan")), {}, "actor/pg_loss is nan at step 2"),
        ([{"step": 1, LENGTH: 1.0}], {}, "has no actor/pg_loss"),
        ([], {}, "has no actor/pg_loss"),
        (ROWS, {"case": "smal"}, "no case is called 'smal'"),
    ],
)
def test_what_is_not_taken(leave, project, capsys, rows, fields, says):
    assert says in refused(capsys, leave(rows, **fields))
    assert not (project / "e2e" / "baselines").exists()


def test_a_result_that_cannot_be_read(project, capsys):
    assert "result.json" in refused(capsys, project)


def test_a_case_that_compares_nothing(leave, project, capsys):
    run = leave(ROWS)
    file = project / "e2e" / "small.yaml"
    file.write_text(yaml.safe_dump({**CASE, "expect": {}}))
    assert checks_of(run) == []
    assert "expect.metrics.baseline" in refused(capsys, run)


def test_a_case_outside_the_project_is_found_by_the_file_that_ran(leave, project):
    elsewhere = project / "elsewhere" / "other.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(yaml.safe_dump({**CASE, "name": "other"}))
    assert main(["e2e", "accept", str(leave(ROWS, case="other", file=elsewhere))]) == 0
    assert (elsewhere.parent / "baselines" / "other.json").is_file()


@given(
    old=st.floats(allow_nan=False, allow_infinity=False, width=32),
    gap=st.floats(min_value=0, max_value=3, width=16),
    sign=st.sampled_from([1, -1]),
)
def test_the_tolerance_is_that_of_the_case(old, gap, sign):
    """Against the definition, away from its edge, where rounding decides."""
    within = Tolerance(rtol=1e-3, atol=1e-2)
    width = 1e-2 + 1e-3 * abs(old)
    if 0.99 < gap < 1.01:
        return
    assert (difference(1, old, old + sign * gap * width, within) == "") == (gap < 1)
