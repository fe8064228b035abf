"""Expectations against records: the verdict of the job, and the files it left. What a run printed counts only where a
case forbids a line of it.

Records that are missing or broken are findings, never errors: a run that failed has few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.e2e.case import Case
from corral.e2e.file_checks import file_checks, log_checks
from corral.e2e.metric_checks import metric_checks, read_metrics
from corral.e2e.reading import ABSENT, Unreadable, cut, equal, nearest, read_json, read_trace
from corral.e2e.result import Check, JobPart

__all__ = ["evaluate", "read_metrics"]


def evaluate(case: Case, job: JobPart, records: Path) -> list[Check]:
    """Every expectation of the case, the most telling first: how the job ended, what it planned, which phases ran, what
    it measured, left and printed, what it took. records: the folder with the records of the job's last attempt."""
    return [
        *_run_checks(case, job),
        *_plan_checks(case, records),
        *_phase_checks(case, records),
        *metric_checks(case.expect, records),
        *file_checks(case, records),
        *log_checks(case, records),
        *_limit_checks(case, job, records),
    ]


def _run_checks(case: Case, job: JobPart) -> Iterator[Check]:
    """The verdict. The status says in the words of the verdict what happened instead."""
    expect, verdict = case.expect, job.verdict
    status = str(verdict.get("status") or "no verdict")
    if status == expect.status:
        yield Check(group="run", name="status", expected=expect.status, found=status, ok=True)
    else:
        said = str(verdict.get("message") or verdict.get("first_error") or "")
        found = said if said.startswith(status) else f"{status}{f': {said}' if said else ''}"
        yield Check(group="run", name="status", expected=expect.status, found=" ".join(found.split())[:500], ok=False)
    expected = {
        "failure_class": expect.failure_class,
        "cause": expect.cause,
        "failing_rank": expect.failing_rank,
        "exit_code": 0 if expect.exit_code is None and expect.status == "SUCCEEDED" else expect.exit_code,
    }
    for name, value in expected.items():
        if value is not None:
            yield equal("run", name.replace("_", " "), value, ABSENT if verdict.get(name) is None else verdict[name])


def _plan_checks(case: Case, records: Path) -> Iterator[Check]:
    if not case.expect.plan:
        return
    try:
        plan = read_json(records, "plan.json")
    except Unreadable as problem:
        yield problem.check("plan", "plan.json")
        return
    for path, expected in case.expect.plan.items():
        found, parent, last = plan, plan, path
        for part in path.split("."):
            parent, last = found, part
            found = found.get(part, ABSENT) if isinstance(found, dict) else ABSENT
        near = nearest(last, parent) if found is ABSENT and isinstance(parent, dict) else ""
        yield equal("plan", f"plan {path}", expected, found, near)


def _phase_checks(case: Case, records: Path) -> Iterator[Check]:
    """Phases of the driver and of the ranks, by their names in trace.json."""
    expect = case.expect
    if not expect.ran and not expect.not_ran:
        return
    try:
        events = read_trace(records)
        if not events:  # of nothing nothing can be missing
            raise Unreadable("no phase in it")
    except Unreadable as problem:
        yield problem.check("phases", "trace.json")
        return
    times: dict[str, int] = {}
    for event in events:
        times[event["name"]] = times.get(event["name"], 0) + 1
    detail = cut("phases of the run: " + ", ".join(sorted(times)))
    for name in expect.ran:
        found = f"{times[name]} times" if name in times else f"not run{nearest(name, times)}"
        yield Check(group="phases", name=f"ran {name}", expected="run", found=found, ok=name in times, detail=detail)
    for name in expect.not_ran:
        found = f"{times[name]} times" if name in times else "not run"
        yield Check(
            group="phases",
            name=f"not ran {name}",
            expected="not run",
            found=found,
            ok=name not in times,
            detail=detail,
        )


def _limit_checks(case: Case, job: JobPart, records: Path) -> Iterator[Check]:
    expect = case.expect
    if expect.seconds is not None:
        seconds = running_seconds(job)
        found = "it never ran" if seconds is None else f"{seconds:.1f} s"
        ok = seconds is not None and seconds <= expect.seconds
        yield Check(group="limits", name="seconds", expected=f"at most {expect.seconds:g} s", found=found, ok=ok)
    if expect.memory_gib is not None:
        yield _memory(expect.memory_gib, case.topology.world, records)


def running_seconds(job: JobPart) -> float | None:
    """How long the command of the last attempt ran: from RUNNING to the state after it. None: it never did."""
    seconds = None
    for (state, start), (_, end) in zip(job.states, job.states[1:], strict=False):
        if state == "RUNNING":
            seconds = end - start
    return seconds


def _memory(most: float, world: int, records: Path) -> Check:
    """The peak that every rank writes beside its progress; one that wrote none may have had any."""
    peaks: dict[int, float] = {}
    for path in records.glob("progress/rank-*.json"):
        try:
            said: Any = read_json(records, str(path.relative_to(records)))
            rank, peak = int(said["rank"]), float(said["peak_memory_gib"])
        except (Unreadable, KeyError, TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(peak):
            peaks[rank] = peak
    expected = f"at most {most:g} GiB a rank"
    if not peaks:
        return Check(group="limits", name="memory", expected=expected, found="no rank recorded its memory", ok=False)
    rank = max(peaks, key=lambda rank: peaks[rank])
    found = f"{peaks[rank]:.2f} GiB on rank {rank}"
    silent = [other for other in range(world) if other not in peaks]
    if silent and peaks[rank] <= most:
        found = f"rank {silent[0]} recorded none; of {len(peaks)} that did, {found}"
    ok = not silent and peaks[rank] <= most
    return Check(group="limits", name="memory", expected=expected, found=found, ok=ok)
