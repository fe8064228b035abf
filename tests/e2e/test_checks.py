"""Every expectation on records that a run could have left: met, missed, missing, broken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from corral.e2e.case import Case
from corral.e2e.checks import evaluate, read_metrics
from corral.e2e.result import Check, JobPart

SUCCEEDED = {"status": "SUCCEEDED", "cause": "exit_code", "message": "SUCCEEDED: exit code 0", "exit_code": 0}
HUNG = {
    "status": "TIMEOUT", "cause": "hang", "failure_class": "timeout", "failing_rank": 5, "failing_node": 1,
    "message": "TIMEOUT (hang): rank 5 on node-1: is stopped",
}  # fmt: skip
STATES = [("QUEUED", 100.0), ("RUNNING", 110.0), ("COLLECTING", 150.5), ("SUCCEEDED", 152.0)]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Of a run of two steps on two nodes of two devices."""
    folder = tmp_path / "job"
    (folder / "progress").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"topology": {"world": 4}, "actor": {"sp": 2, "lr": 1e-6}}))
    spans = [{"ph": "X", "name": name} for name in ("gen", "generate", "update_actor", "update_actor")]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [*spans, {"ph": "M", "name": "thread_name"}]}))
    write_metrics(folder, {"step": 1, "actor/pg_loss": 0.5}, {"step": 2, "actor/pg_loss": -0.25})
    (folder / "driver.log").write_text("starting\nall is well\n")
    for rank in range(4):
        log = folder / f"logs/node-{rank // 2}/rank-{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"rank {rank}: built\n")
        progress = {"rank": rank, "peak_memory_gib": 1.0 + rank / 8}
        (folder / f"progress/rank-{rank}.json").write_text(json.dumps(progress))
    return folder


def write_metrics(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def checks(records: Path, verdict: dict[str, Any] = SUCCEEDED, states: Any = STATES, **expect: Any) -> list[Check]:
    document = {"name": "small", "summary": "s", "script": "s.sh", "expect": expect}
    case = Case.model_validate({**document, "topology": {"nodes": 2, "devices_per_node": 2}})
    job = JobPart(
        job_id="rj-0", url="", command=[], nodes=2, devices_per_node=2, verdict=verdict, states=states, records="job"
    )
    return evaluate(case, job, records)


def missed(records: Path, *arguments: Any, **expect: Any) -> list[str]:
    """All checks that failed, as they are told."""
    return [str(check) for check in checks(records, *arguments, **expect) if not check.ok]


EVERYTHING: dict[str, Any] = {
    "steps": 2,
    "plan": {"topology.world": 4, "actor.sp": 2, "actor.lr": 1.0e-6},
    "metrics": {
        "finite": ["actor/pg_loss"],
        "within": {"actor/pg_loss": [-1, 1], "step": [1, 2]},
        "trend": {"actor/pg_loss": "falls"},
    },
    "ran": ["generate"],
    "not_ran": ["update_critic"],
    "files": ["plan.json", "logs/*/rank-?.log"],
    "forbidden": ["Traceback", "nan"],
    "rank_logs": True,
    "seconds": 41,
    "memory_gib": 1.5,
}


def test_good_records_meet_every_expectation_in_the_order_of_their_weight(records):
    found = checks(records, **EVERYTHING)
    assert [str(check) for check in found if not check.ok] == []
    assert [(check.group, check.name) for check in found] == [
        ("run", "status"),
        ("run", "exit code"),
        ("plan", "plan topology.world"),
        ("plan", "plan actor.sp"),
        ("plan", "plan actor.lr"),
        ("phases", "ran generate"),
        ("phases", "not ran update_critic"),
        ("metrics", "steps"),
        ("metrics", "actor/pg_loss"),
        ("metrics", "actor/pg_loss"),
        ("metrics", "step"),
        ("metrics", "actor/pg_loss"),
        ("files", "file plan.json"),
        ("files", "file logs/*/rank-?.log"),
        ("logs", "no line matches Traceback"),
        ("logs", "no line matches nan"),
        ("logs", "rank logs"),
        ("limits", "seconds"),
        ("limits", "memory"),
    ]


def test_no_records_at_all_are_findings(tmp_path):
    found = checks(tmp_path / "none", {}, [], **EVERYTHING)
    assert str(found[0]) == "status: expected SUCCEEDED, found no verdict"
    passed = [check.name for check in found if check.ok]
    assert passed == []
    assert "plan.json: expected a whole record, found no such file" in map(str, found)


@pytest.mark.parametrize("name", ["plan.json", "trace.json", "metrics.jsonl", "progress/rank-0.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1", b"[[]]", b"null", b"[" * 100_000, b'{"traceEvents": 3}'])
def test_broken_records_are_findings(records, name, content):
    (records / name).write_bytes(content)
    found = checks(records, **EVERYTHING)
    groups = {"plan.json": "plan", "trace.json": "phases", "metrics.jsonl": "metrics", "progress/rank-0.json": "limits"}
    assert {check.group for check in found if not check.ok} == {groups[name]}


@pytest.mark.parametrize("name", ["plan.json", "trace.json", "metrics.jsonl", "driver.log"])
def test_a_folder_in_the_place_of_a_record(records, name):
    (records / name).unlink()
    (records / name).mkdir()
    assert len(checks(records, **EVERYTHING)) >= 15


# The verdict ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_in_the_words_of_the_verdict(records):
    failed = {
        "status": "FAILED", "failure_class": "user", "exit_code": 3, "cause": "exit_code",
        "message": "FAILED (user): rank 1 on node-0: ValueError: no\n; exit code 3",
    }  # fmt: skip
    assert missed(records, failed) == [
        "status: expected SUCCEEDED, found FAILED (user): rank 1 on node-0: ValueError: no ; exit code 3",
        "exit code: expected 0, found 3",
    ]
    assert missed(records, failed, status="FAILED", failure_class="user", exit_code=3, cause="exit_code") == []
    assert missed(records, {**failed, "message": ""})[0] == "status: expected SUCCEEDED, found FAILED"
    assert missed(records, failed, status="FAILED", failure_class="infra", exit_code=4) == [
        "failure class: expected infra, found user",
        "exit code: expected 4, found 3",
    ]


def test_a_hang_that_is_expected(records):
    expect = {"status": "TIMEOUT", "failure_class": "timeout", "cause": "hang", "failing_rank": 5}
    assert missed(records, HUNG, **expect) == []
    assert missed(records, {**HUNG, "failing_rank": 4}, **expect) == ["failing rank: expected 5, found 4"]
    assert missed(records, {**HUNG, "failing_rank": None}, **expect) == ["failing rank: expected 5, found nothing"]
    assert missed(records, {**HUNG, "cause": "run"}, **expect) == ["cause: expected hang, found run"]
    assert missed(records, SUCCEEDED, **expect)[0] == "status: expected TIMEOUT, found SUCCEEDED: exit code 0"


def test_a_success_that_was_not_expected_is_red(records):
    assert missed(records, SUCCEEDED, status="FAILED", failure_class="user") == [
        "status: expected FAILED, found SUCCEEDED: exit code 0",
        "failure class: expected user, found nothing",
    ]


# Plan and phases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected", "said"),
    [
        ("topology.world", 8, "expected 8, found 4"),
        ("topology.world", True, "expected true, found 4"),
        ("topology.world", "4", 'expected "4", found 4'),
        ("topology.word", 4, "expected 4, found nothing; the nearest is 'world'"),
        ("topology.world.more", 4, "expected 4, found nothing"),
        ("critic.sp", 2, "expected 2, found nothing"),
        ("actor", None, 'expected null, found {"sp": 2, "lr": 1e-06}'),
    ],
)
def test_a_plan_that_is_another(records, path, expected, said):
    assert missed(records, plan={path: expected}) == [f"plan {path}: {said}"]


def test_one_is_not_true(records):
    (records / "plan.json").write_text('{"a": true, "b": 1, "c": null}')
    assert missed(records, plan={"a": True, "b": 1.0, "c": None}) == []
    assert len(missed(records, plan={"a": 1, "b": True, "c": False})) == 3


def test_phases(records):
    assert missed(records, ran=["updat_actor"], not_ran=["update_actor"]) == [
        "ran updat_actor: expected run, found not run; the nearest is 'update_actor'",
        "not ran update_actor: expected not run, found 2 times",
    ]
    assert missed(records, ran=["thread_name"]) == ["ran thread_name: expected run, found not run"]  # no span
    (check,) = [check for check in checks(records, ran=["gen"]) if check.group == "phases"]
    assert check.detail == "phases of the run: gen, generate, update_actor"


# Metrics -------------------------------------------------------------------------------------------------------------


def metric(records: Path, *values: Any, **expect: Any) -> list[str]:
    write_metrics(records, *({"step": i + 1, "loss": value} for i, value in enumerate(values)))
    return missed(records, metrics=expect)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", True, [1]])
def test_what_is_no_finite_number(records, value):
    shown = f"{value:g}" if isinstance(value, float) else json.dumps(value)
    said = [f"loss: expected a finite number, found {shown} on line 2"]
    assert metric(records, 1, value, 2, finite=["loss"]) == said
    assert metric(records, 1, value, 2, trend={"loss": "rises"}) == [said[0].replace("a finite number", "rises")]


def test_bounds_hold_on_every_line(records):
    assert metric(records, 0, 1, within={"loss": [0, 1]}) == []
    assert metric(records, 0, 1.5, 2, within={"loss": [0, 1]}) == ["loss: expected 0 to 1, found 1.5 on line 2"]
    assert metric(records, 3, within={"loss": [3, 3]}) == []
    assert metric(records, 4, within={"loss": [3, 3]}) == ["loss: expected 3, found 4 on line 1"]
    assert metric(records, 10**400, within={"loss": [0, 1]}) == ["loss: expected 0 to 1, found inf on line 1"]


def test_a_metric_that_is_missing_is_told_with_the_nearest(records):
    write_metrics(records, {"step": 1, "loss": 1}, {"step": 2, "los": 1})
    said = "found nothing; the nearest is 'los' on line 2"
    assert missed(records, metrics={"finite": ["loss"]}) == [f"loss: expected a finite number, {said}"]


def test_trends_compare_thirds(records):
    assert metric(records, 0, 9, 9, 9, 9, 1, trend={"loss": "rises"}) == []
    assert metric(records, 5, 9, 1, 1, 9, 4, trend={"loss": "rises"}) == [
        "loss: expected rises, found 7 to 6.5 (means of the first and the last 2 of 6 lines)"
    ]
    assert metric(records, 2, 2, trend={"loss": "falls"})[0].startswith("loss: expected falls, found 2 to 2")
    assert metric(records, 2, trend={"loss": "falls"}) == [
        "loss: expected falls, found one line, and a trend needs two"
    ]


def test_the_number_of_steps(records):
    assert missed(records, steps=3) == ["steps: expected 3, found 2"]
    (records / "metrics.jsonl").write_text("")
    assert missed(records, steps=0) == []
    assert missed(records, metrics={"finite": ["loss"]}) == [
        "metrics.jsonl: expected a whole record, found an empty file"
    ]


def test_a_torn_line_is_named(records):
    with (records / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "act')
    assert missed(records, steps=2) == ["metrics.jsonl: expected a whole record, found line 3 is not a JSON object"]
    with pytest.raises(ValueError, match="line 3 is not a JSON object"):
        read_metrics(records)


# Files, logs, limits -------------------------------------------------------------------------------------------------


def test_files_that_are_not_there(records):
    (records / "checkpoint.pt").mkdir()  # a folder is no file
    assert missed(records, files=["*.pt", "logs/*/rank-?.log", "**/rank-9.log"]) == [
        "file *.pt: expected there, found none",
        "file **/rank-9.log: expected there, found none",
    ]


def test_a_forbidden_line_is_shown_with_its_file_and_line(records):
    log = records / "logs/node-1/rank-3.log"
    log.write_text("fine\nloss is nan\n" + "nan again\n" * 8 + "\xff nan without an end")
    (check,) = [check for check in checks(records, forbidden=[r"\bnan\b"]) if check.group == "logs"]
    assert not check.ok
    assert check.found == "logs/node-1/rank-3.log:2: loss is nan (and 9 more)"
    assert check.detail.splitlines()[0] == "logs/node-1/rank-3.log:3: nan again"
    assert len(check.detail.splitlines()) == 4


def test_what_the_command_printed_comes_first_and_nothing_is_left_out(records):
    (records / "driver.log").write_text("bad\n")
    for name in ("logs/node-0/rank-0.log", "logs/node-0/node.log"):
        (records / name).write_text("bad\n")
    assert missed(records, forbidden=["bad"]) == [
        "no line matches bad: expected none, found driver.log:1: bad (and 2 more)"
    ]
    good = [check.found for check in checks(records, forbidden=["worse"]) if check.group == "logs"]
    assert good == ["none in 6 lines of 6 logs"]


def test_no_logs_are_no_proof(tmp_path):
    assert missed(tmp_path, forbidden=["bad"]) == ["no line matches bad: expected none, found no log to look at"]


@pytest.mark.parametrize("name", ["driver.log", "logs/node-1/rank-2.log"])
def test_a_log_that_is_missing_is_no_proof(records, name):
    (records / name).unlink()
    (said,) = missed(records, forbidden=["bad"])
    assert said.endswith(f"lines, but there is no {Path(name).name} to look at")


@pytest.mark.parametrize("before", ["x" * 200_000, "\r".join(["50 %"] * 50_000) + "\r"])
def test_a_forbidden_text_far_inside_a_line(records, before):
    (records / "driver.log").write_text(f"first\n{before}Traceback (most recent call last)\n")
    (said,) = missed(records, forbidden=[r"Traceback \(most recent call last\)$"])
    assert "driver.log:2: " in said
    assert "Traceback (most" in said
    assert len(said) < 500
    assert missed(records, forbidden=["^xT", "zzz"] if before[0] == "x" else ["^%"]) == []


def test_a_trace_without_any_phase_is_no_proof(records):
    (records / "trace.json").write_text('{"traceEvents": []}')
    assert missed(records, not_ran=["generate"]) == ["trace.json: expected a whole record, found no phase in it"]


@pytest.mark.parametrize("peak", ["NaN", "1e999", "null", "0.5}}"])
def test_a_rank_that_did_not_record_its_memory_is_no_proof(records, peak):
    (records / "progress/rank-2.json").write_text(f'{{"rank": 2, "peak_memory_gib": {peak}}}')
    (said,) = missed(records, memory_gib=2)
    assert said.endswith("found rank 2 recorded none; of 3 that did, 1.38 GiB on rank 3")


def test_numbers_as_large_as_there_are(records):
    write_metrics(records, *({"loss": 1e308} for _ in range(9)))
    (said,) = missed(records, metrics={"trend": {"loss": "rises"}})
    assert "1e+308 to 1e+308" in said


def test_what_a_job_wrote_fits_into_a_report(records):
    (records / "plan.json").write_text(json.dumps({"a": "\ud800", "b": ["x" * 100] * 1000, "c": [True]}))
    found = [check for check in checks(records, plan={"a": "x", "b": 1, "c": [1]}) if check.group == "plan"]
    assert [check.ok for check in found] == [False] * 3
    assert all(len(check.model_dump_json()) < 1000 for check in found)
    assert found[0].found == "\\ud800"
    assert found[2].found == "[true]"


def test_a_text_may_hold_any_character(records):
    (records / "metrics.jsonl").write_text('{"step": 1, "note": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert missed(records, steps=1) == []


def test_a_rank_without_a_log(records):
    (records / "logs/node-1/rank-2.log").rename(records / "logs/node-0/rank-2.log")
    assert missed(records, rank_logs=True) == ["rank logs: expected 4, found 3 (no logs/node-1/rank-2.log)"]


def test_how_long_the_command_of_the_last_attempt_ran(records):
    assert missed(records, seconds=40) == ["seconds: expected at most 40 s, found 40.5 s"]
    again = [*STATES[:3], ("RETRYING", 151.0), ("RUNNING", 200.0), ("COLLECTING", 210.0), ("SUCCEEDED", 211.0)]
    assert missed(records, SUCCEEDED, again, seconds=10) == []
    assert missed(records, SUCCEEDED, STATES[:1], seconds=40) == ["seconds: expected at most 40 s, found it never ran"]


def test_the_rank_that_took_the_most_memory(records):
    assert missed(records, memory_gib=1.2) == ["memory: expected at most 1.2 GiB a rank, found 1.38 GiB on rank 3"]
    for path in records.glob("progress/*"):
        path.unlink()
    assert missed(records, memory_gib=1.2) == [
        "memory: expected at most 1.2 GiB a rank, found no rank recorded its memory"
    ]
