from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from corral.e2e.case import Expectations, Topology, read_case
from corral.e2e.checks import Check, Facts, evaluate
from tests.e2e.cases import write_case

PLAN = {"topology": {"world": 8}, "actor": {"sp": 2}}


@pytest.fixture
def case(tmp_path: Path):
    return read_case(write_case(tmp_path, ""))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(PLAN))
    write_metrics(folder, {"step": 1, "actor/pg_loss": 0.5})
    return folder


def write_metrics(folder: Path, *rows: dict) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def failed(case, run_dir: Path, exit_code: int = 0, leftovers: tuple[str, ...] = ()) -> list[str]:
    return [str(check) for check in evaluate(case, Facts(exit_code, run_dir, leftovers)) if not check.ok]


def expecting(case, **changes):
    return replace(case, expect=replace(case.expect, **changes))


def test_good_records_meet_every_expectation(case, run_dir):
    checks = evaluate(case, Facts(0, run_dir, ()))
    assert [check.name for check in checks] == [
        "exit code",
        "plan topology.world",
        "plan actor.sp",
        "lines of metrics.jsonl",
        "actor/pg_loss",
        "actor/pg_loss",
        "processes left",
    ]
    assert all(check.ok for check in checks)


def test_the_exit_code_decides_whatever_the_files_say(case, run_dir):
    assert failed(case, run_dir, exit_code=3) == ["exit code: expected 0, found 3"]
    assert failed(expecting(case, exit_code=78), run_dir, exit_code=78) == []


def test_a_process_left_behind_is_a_failure(case, run_dir):
    assert failed(case, run_dir, leftovers=("pid 7 sleep 60",)) == [
        "processes left: expected 0, found 1 (pid 7 sleep 60)"
    ]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"topology": {"world": 4}, "actor": {"sp": 2}}, "plan topology.world: expected 8, found 4"),
        ({"topology": {"world": "8"}, "actor": {"sp": 2}}, 'plan topology.world: expected 8, found "8"'),
        ({"topology": {"world": 8}, "actor": {"sp": True}}, "plan actor.sp: expected 2, found true"),
        ({"topology": {"world": 8}, "actor": None}, "plan actor.sp: expected 2, found nothing"),
        ({"topology": {"world": 8}, "actor": {}}, "plan actor.sp: expected 2, found nothing"),
    ],
)
def test_a_plan_that_differs(case, run_dir, plan, said):
    (run_dir / "plan.json").write_text(json.dumps(plan))
    assert failed(case, run_dir) == [said]


def test_true_is_not_one(case, run_dir):
    (run_dir / "plan.json").write_text(json.dumps({"a": True}))
    assert failed(expecting(case, plan={"a": 1}), run_dir) == ["plan a: expected 1, found true"]
    assert failed(expecting(case, plan={"a": True}), run_dir) == []


def test_a_plan_that_is_missing_or_cut_short(case, run_dir):
    (run_dir / "plan.json").write_text('{"topology": {"wor')
    assert failed(case, run_dir)[0].startswith("plan.json: expected JSON, found ")
    (run_dir / "plan.json").unlink()
    assert failed(case, run_dir) == ["plan.json: expected written, found no such file"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None, "0.5", True, [0.5]])
def test_a_metric_that_is_no_finite_number(case, run_dir, value):
    write_metrics(run_dir, {"actor/pg_loss": value})
    said = failed(expecting(case, within={}), run_dir)
    assert len(said) == 1
    assert said[0].startswith("actor/pg_loss: expected a finite number, found ")


def test_a_metric_is_checked_on_every_line(case, run_dir):
    write_metrics(run_dir, {"actor/pg_loss": 0.0}, {"actor/pg_loss": 1.5}, {"actor/pg_loss": 0.0})
    assert failed(expecting(case, lines=3), run_dir) == ["actor/pg_loss: expected -1 to 1, found 1.5 on line 2"]
    write_metrics(run_dir, {"actor/pg_loss": 0.0}, {"step": 2})
    assert failed(expecting(case, lines=2, finite=()), run_dir) == [
        "actor/pg_loss: expected -1 to 1, found nothing on line 2"
    ]


def test_bounds_include_their_ends(case, run_dir):
    for value in (-1, 1):
        write_metrics(run_dir, {"actor/pg_loss": value})
        assert failed(case, run_dir) == []


def test_metric_files_that_are_missing_empty_or_cut_short(case, run_dir):
    (run_dir / "metrics.jsonl").write_text('{"actor/pg_loss": 0.5}\n{"actor/pg_lo')
    assert failed(case, run_dir) == [
        "metrics.jsonl: expected one JSON object a line, found line 2 of metrics.jsonl is not a JSON object"
    ]
    (run_dir / "metrics.jsonl").write_text("")
    assert failed(case, run_dir) == [
        "lines of metrics.jsonl: expected 1, found 0",
        "metrics.jsonl: expected metrics, found an empty file",
    ]
    (run_dir / "metrics.jsonl").unlink()
    assert failed(case, run_dir) == ["metrics.jsonl: expected written, found no such file"]


def test_every_rank_needs_its_log_on_its_node(case, run_dir):
    case = expecting(replace(case, topology=Topology(2, 2)), rank_logs=True)
    for name in ("node-0/rank-0", "node-0/rank-1", "node-1/rank-2", "node-1/rank-3"):
        log = run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    assert failed(case, run_dir) == []
    (run_dir / "logs/node-1/rank-2.log").rename(run_dir / "logs/node-0/rank-2.log")
    assert failed(case, run_dir) == ["rank logs: expected 4, found 3 (no logs/node-1/rank-2.log)"]


def test_a_case_may_expect_nothing_but_an_exit_code(case, tmp_path):
    nothing = Expectations(0, {}, None, (), {}, False)
    checks = evaluate(replace(case, expect=nothing), Facts(0, tmp_path / "absent", ()))
    assert checks == [Check("exit code", "0", "0", True), Check("processes left", "0", "0", True)]
