from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.e2e.checks import Check
from corral.e2e.report import Verdict, table

GOOD = Check("exit code", "0", "0", True)
BAD = Check("lines of metrics.jsonl", "1", "0", False)


def test_the_last_line():
    assert Verdict("two-node-ppo", "PASSED", "", 0, 61.4).line() == "VERDICT: PASSED two-node-ppo in 61 s"
    assert Verdict("c", "FAILED", str(BAD), 1, 61.4).line() == (
        "VERDICT: FAILED c: lines of metrics.jsonl: expected 1, found 0"
    )
    assert "\n" not in Verdict("c", "FAILED", "two\nlines\n", 1, 1.0).line()


def test_verdict_json_is_complete(tmp_path):
    Verdict("c", "FAILED", "why", 75, 2.0, (GOOD, BAD), 75, ("pid 7 sleep",)).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["verdict.json"]
    assert json.loads((tmp_path / "verdict.json").read_text()) == {
        "case": "c",
        "status": "FAILED",
        "reason": "why",
        "exit_code": 75,
        "seconds": 2.0,
        "checks": [
            {"name": "exit code", "expected": "0", "found": "0", "ok": True},
            {"name": "lines of metrics.jsonl", "expected": "1", "found": "0", "ok": False},
        ],
        "child_exit_code": 75,
        "leftovers": ["pid 7 sleep"],
    }


def test_the_table_shows_the_last_step_and_what_failed(tmp_path: Path):
    (tmp_path / "plan.json").write_text('{"topology": {"world": 8}}')
    rows = [
        {"step": 1, "timing_s/gen": 99.0},
        {
            "step": 2,
            "rollout/replayed": 0.0,
            "timing_s/gen": 1.5,
            "timing_s/update_actor": 2.25,
            "timing_s/step": 4.0,
            "actor/pg_loss": -0.125,
            "critic/score/mean": 0.25,
            "perf/throughput": 50.0,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(tmp_path, [GOOD, BAD]) == [
        "step 2, rollouts generated in this run",
        "  phase         seconds    policy loss   -0.125",
        "  update_actor     2.25    reward, mean  0.25",
        "  gen              1.50    tokens/s      50 per device, 400 in all",
        "  step             4.00",
        "  NOT as expected: lines of metrics.jsonl: expected 1, found 0",
        "checks: 1 of 2 as expected",
        f"records: {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("replayed", "said"),
    [(1.0, "replayed from the dump (no engine started)"), (0, "generated in this run"), (None, "of unrecorded origin")],
)
def test_the_table_says_where_the_rollouts_came_from(tmp_path, replayed, said):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/replayed": replayed}) + "\n")
    assert table(tmp_path, [])[0] == f"step 1, rollouts {said}"


@pytest.mark.parametrize("metrics", [None, "", "{broken", '{"perf/throughput": "fast", "timing_s/gen": null}\n'])
@pytest.mark.parametrize("plan", [None, "{broken", "{}", "[]", '{"topology": {"world": null}}'])
def test_the_table_stands_without_whole_records(tmp_path, metrics, plan):
    for name, text in (("metrics.jsonl", metrics), ("plan.json", plan)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert table(tmp_path, [GOOD])[-2:] == ["checks: 1 of 1 as expected", f"records: {tmp_path}"]
    assert table(tmp_path, [])[-1] == f"records: {tmp_path}"
