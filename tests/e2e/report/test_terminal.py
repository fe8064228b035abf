from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.e2e.report.terminal import lines
from corral.e2e.result import ParityReport
from tests.e2e.report.made import ERROR, EVIL, check, crashed, diverged, passed, records


def test_the_last_step_then_parity_and_where_the_records_are(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (job / "plan.json").write_text('{"topology": {"world": 8}}')
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
    (job / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lines(passed(), tmp_path) == [
        "step 2, rollouts generated in this run",
        "  phase         seconds    policy loss   -0.125",
        "  update_actor     2.25    reward, mean  0.25",
        "  gen              1.50    tokens/s      50 per device, 400 in all",
        "  step             4.00",
        "checks: 2 of 2 as expected",
        "parity: 42 numbers are equal to those of the reference run",
        f"records: {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("replayed", "said"),
    [
        (1.0, ", rollouts replayed from the dump (no engine started)"),
        (0, ", rollouts generated in this run"),
        (None, ""),
    ],
)
def test_where_the_rollouts_came_from(tmp_path, replayed, said):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/replayed": replayed}) + "\n")
    assert lines(passed(), tmp_path)[0] == f"step 1{said}"


def test_a_program_that_takes_no_times_has_figures_alone(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/metrics.jsonl").write_text('{"step": 2, "actor/pg_loss": 0.25}\n')
    assert lines(passed(), tmp_path)[:2] == ["step 2", "  policy loss  0.25"]


def test_what_failed_comes_first(tmp_path):
    records(tmp_path)
    shown = lines(crashed(), tmp_path)
    assert shown[0] == f"  what          rank 5 on node-1: {ERROR}; exit code 1"
    assert "  where         rank 5 on node-1" in shown
    assert "  step          3 (2 steps recorded)" in shown
    assert "  phase         update_actor" in shown
    assert "  run it again  corral e2e replay run/result.json" in shown
    assert shown[-3:] == [
        "  NOT as expected: exit code: expected 0, found 1",
        "checks: 1 of 2 as expected",
        f"records: {tmp_path}",
    ]


def test_a_difference_names_its_place_and_what_to_look_at(tmp_path):
    assert "parity: first difference in gradients (step 2, rank 5): actor/0/w 1.5, not 1.0; a denominator" in lines(
        diverged(), tmp_path
    )


def test_many_failed_checks_are_counted(tmp_path):
    shown = lines(crashed(checks=[check(f"c{i}", ok=False) for i in range(100)]), tmp_path)
    assert "  and 60 more that are not as expected" in shown
    assert "checks: 0 of 100 as expected" in shown


@pytest.mark.parametrize("metrics", ["", "{broken", '{"perf/throughput": "fast", "timing_s/gen": null}\n', "[1]\n"])
@pytest.mark.parametrize("plan", ["{broken", "{}", "[]", '{"topology": {"world": null}}'])
def test_it_stands_without_whole_records(tmp_path, metrics, plan):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/metrics.jsonl").write_text(metrics)
    (tmp_path / "job/plan.json").write_text(plan)
    assert lines(passed(parity=None), tmp_path)[-2:] == ["checks: 2 of 2 as expected", f"records: {tmp_path}"]


def test_hostile_text_is_one_short_line_each(tmp_path: Path):
    text = EVIL + "\n" + "x" * 10_000
    records(tmp_path, text, text)
    bad = [check(text, ok=False, expected=text, found=text)]
    result = crashed(case=text, reason=text, again=text, checks=bad, parity=ParityReport(rows=[], hint=text))
    for line in lines(result, tmp_path):
        assert len(line) < 800
        assert line.isprintable() or set(line) & {"\ufffd"}
        assert not set(line) & {"\n", "\r", "\x1b", "\x00", "\x85", "\u2028", "\u202e"}
