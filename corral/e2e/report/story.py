"""What every report says first: what failed, where, of which class, with which first error, and how to run it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from corral.e2e.report import text
from corral.e2e.report.logs import Log, read_logs
from corral.e2e.report.records import (
    Steps,
    Trace,
    read_findings,
    read_progress,
    read_steps,
    read_trace,
    records_of,
)
from corral.e2e.result import Check, JobPart, Result
from corral.findings import Finding, worst

_CLASSES = {
    "user": "the code or the data of the job",
    "config": "the command was refused",
    "infra": "a node, the cluster or the service; running it again is safe",
    "timeout": "a deadline passed",
    "cancel": "somebody stopped it",
}


@dataclass(frozen=True)
class Fact:
    """name: class, where, step, phase, first error ... code: whether the value is text of the job or a command."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True)
class Side:
    """One job of the run with its records. folder: relative to the run's."""

    part: JobPart
    folder: str
    steps: Steps
    trace: Trace
    logs: list[Log] = field(default_factory=list)
    logs_note: str = ""

    @property
    def ended_well(self) -> bool:
        return self.part.verdict.get("status") == "SUCCEEDED"

    def failing_log(self) -> Log | None:
        """The log to read first: the failing rank's, else the first that holds an error, else the driver's."""
        rank = self.part.verdict.get("failing_rank")
        of_rank = [log for log in self.logs if log.rank is not None and log.rank == rank]
        with_error = [log for log in self.logs if log.error is not None]
        return next(iter([*of_rank, *with_error, *self.logs]), None)


@dataclass(frozen=True)
class Story:
    """failing: the job that the failure is of, when it is one's. failed: the checks that are not as expected.
    findings: of what was looked at before the run."""

    result: Result
    folder: Path
    main: Side | None
    reference: Side | None
    failing: Side | None
    findings: list[Finding]
    facts: list[Fact]

    @property
    def passed(self) -> bool:
        return self.result.status == "PASSED"

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.result.checks if not check.ok]

    @property
    def headline(self) -> str:
        return text.line(self.result.line().removeprefix("VERDICT: "), 1000)


def read_story(result: Result, folder: Path) -> Story:
    """Everything the reports of one run are made of. The logs are read once, here."""
    main = _side(folder, result.job, "job")
    reference = _side(folder, result.reference, "reference")
    failing = next((side for side in (main, reference) if side is not None and not side.ended_well), None)
    findings = read_findings(records_of(folder, result.job, "job"), result.job)
    facts = [] if result.status == "PASSED" else _facts(result, folder, failing, findings)
    return Story(result, folder, main, reference, failing, findings, facts)


def _side(folder: Path, part: JobPart | None, default: str) -> Side | None:
    if part is None:
        return None
    records = records_of(folder, part, default)
    logs, note = read_logs(records)
    name = records.relative_to(folder).as_posix()
    return Side(part, name, read_steps(records), read_trace(records), logs, note)


def _facts(result: Result, folder: Path, failing: Side | None, findings: list[Finding]) -> list[Fact]:
    facts = [Fact("what", text.line(result.reason, 1000), True)]
    if result.failure_class:
        meaning = _CLASSES.get(result.failure_class)
        facts.append(Fact("class", text.line(result.failure_class, 80) + (f": {meaning}" if meaning else "")))
    if failing is not None:
        facts += _facts_of_job(result, folder, failing, findings)
    elif result.parity is not None and result.parity.first is not None:
        first = result.parity.first
        facts += [Fact("where", text.line(first.where() or "the whole run")), Fact("phase", text.line(first.phase))]
        facts.append(Fact("first difference", text.line(f"{first.name}: {first.found}, not {first.reference}"), True))
    pointed = next((check for check in result.checks if not check.ok and check.file), None)
    if pointed is not None:
        place = f"{pointed.file}:{pointed.line}" if pointed.line else str(pointed.file)
        facts.append(Fact("in the source", text.line(place), True))
    if result.again:
        facts.append(Fact("run it again", text.line(result.again, 2000), True))
    return facts


def _facts_of_job(result: Result, folder: Path, side: Side, findings: list[Finding]) -> list[Fact]:
    verdict = side.part.verdict
    rank, node = verdict.get("failing_rank"), verdict.get("failing_node")
    places = [f"rank {rank}"] if type(rank) is int else []
    places += [f"node-{node}"] if type(node) is int else []
    bad = worst(findings)
    where = [" on ".join(places)] if places else [bad.where()] if bad is not None and bad.where() else []
    where += ["in the reference run"] if side.part is result.reference else []
    facts = [Fact("where", ", ".join(where))] if where else []
    facts += _progress_facts(side, folder / side.folder, rank)
    log = side.failing_log()
    error = verdict.get("first_error") or (log.error_text if log is not None else "")
    if error:
        facts.append(Fact("first error", text.line(error, 1000), True))
    evidence = verdict.get("evidence")
    if evidence and evidence != error:
        facts.append(Fact("evidence", text.line(evidence, 1000), True))
    if log is not None and log.error is not None:
        facts.append(Fact("log", text.line(f"{side.folder}/{log.file}, line {log.error}"), True))
    return facts


def _progress_facts(side: Side, records: Path, rank: object) -> list[Fact]:
    """The step it failed in is the one after the last that was recorded; the phase is what the rank was called for."""
    facts = []
    if (records / "plan.json").exists():
        done = len(side.steps.rows)
        last = side.steps.rows[-1].get("step", float(done)) if done else 0.0
        facts.append(Fact("step", f"{last + 1:.0f} ({text.count(done, 'step')} recorded)"))
    said = read_progress(records, rank) if type(rank) is int else {}
    phase = said.get("method")
    if isinstance(phase, str) and phase and said.get("state") != "idle":
        facts.append(Fact("phase", text.line(phase, 80), True))
    return facts
