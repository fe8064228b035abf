"""The parity gate: two runs that have to be equal, compared phase by phase in the order in which a step computes them.

The first difference tells where to look: everything after it follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from corral.e2e.case import Parity
from corral.e2e.parity_causes import CAUSES
from corral.e2e.parity_dump import dump
from corral.e2e.parity_gap import Comparison, failing
from corral.e2e.parity_metrics import MISSING, compare_metrics
from corral.e2e.parity_records import PhaseRecords, RunRecords, Unreadable, need_libraries, read_run
from corral.e2e.parity_samples import compare_samples
from corral.e2e.parity_updates import compare_updates, compare_weights
from corral.e2e.result import Check, ParityReport, ParityRow

PHASES = ("samples", "rewards", "log_probs", "values", "advantages", "gradients", "weights", "metrics")
ONLY_METRICS = (
    "neither run kept its phases, so only metrics were compared; trainer.record_phases=full shows where a difference "
    "first appears"
)
SHOWN = 20  # further rows of a failing check


def compare(reference: Path, records: Path, parity: Parity, dump_to: Path) -> ParityReport:
    """Two run folders against each other. Of the first difference, both sides' tensors are left in `dump_to`.

    Never raises for what the runs wrote or did not write: that is a failing row. Raises ConfigError when this
    installation has no numpy and safetensors.
    """
    need_libraries()
    one, many = read_run(reference), read_run(records)
    promised = [run.facts.record_phases for run in (one, many) if run.facts.record_phases != "none"]
    comparisons = list(_comparisons(one, many, parity))
    if promised and not (one.phases or many.phases):
        absent = f"none, though plan.json says {promised[0]}"
        comparisons.insert(0, failing(0, "samples", "phase records", absent, absent))
    rows = [comparison.row for comparison in comparisons]
    compared: dict[str, int] = {}
    for comparison in comparisons:
        compared[comparison.row.phase] = compared.get(comparison.row.phase, 0) + comparison.numbers
    first = next((comparison for comparison in comparisons if not comparison.row.ok), None)
    notes = [] if one.phases or many.phases or promised else [ONLY_METRICS]
    if first is None:
        return ParityReport(rows=rows, compared=compared, hint="; ".join(notes))
    dumped: str | None = dump_to.name
    try:
        dump(first, one, many, parity, dump_to)
    except OSError as error:
        dumped = None
        notes.append(f"both sides could not be kept in {dump_to}: {error.strerror}")
    hint = "; ".join([*_evidence(first, comparisons), f"usual causes: {CAUSES[first.cause]}", *notes])
    return ParityReport(rows=rows, first=first.row, compared=compared, hint=hint, dumped=dumped)


def _evidence(first: Comparison, comparisons: list[Comparison]) -> list[str]:
    """Of the first difference; of a loss that differs also how its gradients do, which tells most."""
    words = list(first.evidence)
    if first.cause == "statistics":
        name = first.row.name.replace("statistics", "gradients")
        words += [w for c in comparisons if (c.row.step, c.row.name) == (first.row.step, name) for w in c.evidence]
    return list(dict.fromkeys(words))


def _comparisons(one: RunRecords, many: RunRecords, parity: Parity) -> Iterator[Comparison]:
    """Step by step; within a step in the order of computation."""
    for step in sorted(one.phases.keys() | many.phases.keys() | one.metrics.keys() | many.metrics.keys()):
        if step in one.phases or step in many.phases:
            yield from _phases(step, one, many, parity)
        if step in one.metrics and step in many.metrics:
            yield from compare_metrics(step, one.metrics[step], many.metrics[step], parity)
        elif step in one.metrics or step in many.metrics:
            texts = ["recorded" if step in run.metrics else "no line of this step" for run in (one, many)]
            yield failing(step, "metrics", "metrics.jsonl", *texts)
    for text, sides in [(t, (t, "")) for t in one.trouble] + [(t, ("", t)) for t in many.trouble]:
        assert text
        yield failing(0, "metrics", "metrics.jsonl", *(side or "readable" for side in sides))


def _phases(step: int, one: RunRecords, many: RunRecords, parity: Parity) -> Iterator[Comparison]:
    sides: list[PhaseRecords] = []
    texts = ["recorded", "recorded"]
    for k, run in enumerate((one, many)):
        try:
            sides.append(run.phase(step))
        except Unreadable as error:
            texts[k] = str(error)
    if len(sides) < 2:
        yield failing(step, "samples", "phase records", *texts)
        return
    here, there = sides
    facts = max(one.facts, many.facts, key=lambda facts: facts.world)
    yield from compare_samples(step, here, there, facts, parity)
    yield from compare_updates(step, here, there, facts, parity)
    yield from compare_weights(step, here, there, facts, parity)


def parity_checks(report: ParityReport) -> list[Check]:
    """A check for each phase that was compared, for the metrics' names, and one that says when those were all.

    The phase of the first difference comes first: what differs in an earlier phase of a later step follows from it.
    """
    checks = [_phase_check(report, phase) for phase in PHASES if any(row.phase == phase for row in report.rows)]
    first = report.first
    checks.sort(key=lambda check: first is None or check.name != first.phase)
    missing = [row for row in report.rows if row.phase == "metrics" and MISSING in (row.reference, row.found)]
    numbers = sum(report.compared.values())
    if numbers == 0 and not any(not check.ok for check in checks):
        found = "no number that both runs have; every metric is one that may differ"
        checks.append(Check(group="parity", name="numbers", expected="some to compare", found=found, ok=False))
    checks.append(
        Check(
            group="parity",
            name="metric names",
            expected="the same metrics in both runs",
            found=_missing(missing[0]) if missing else "the same",
            ok=not missing,
            detail="\n".join(_missing(row) for row in missing[1:SHOWN]),
        )
    )
    if not any(phase in report.compared for phase in PHASES[:-1]):
        found = "none: only metrics were compared"
        checks.append(
            Check(group="parity", name="phase records", expected="of both runs, or of none", found=found, ok=True)
        )
    return checks


def _phase_check(report: ParityReport, phase: str) -> Check:
    rows = [row for row in report.rows if row.phase == phase]
    bad = [row for row in rows if not row.ok]
    steps = len({row.step for row in rows if row.step})
    found = f"{report.compared.get(phase, 0)} numbers of {steps} {'step' if steps == 1 else 'steps'} are equal"
    detail = ""
    if bad:
        found = f"{_line(bad[0])}" + (f", and {len(bad) - 1} more" if len(bad) > 1 else "")
        lead = [f"first difference of the runs; {report.hint}"] if bad[0] == report.first else []
        if not lead and report.first is not None:
            lead = [f"follows the first difference: {report.first.phase} of {_line(report.first)}"]
        detail = "\n".join([*lead, *(_line(row) for row in bad[1:SHOWN])])
    return Check(group="parity", name=phase, expected="the same in both runs", found=found, ok=not bad, detail=detail)


def _line(row: ParityRow) -> str:
    gap = "" if row.gap is None else f", gap {row.gap:.3g}"
    place = f"{row.where()}: " if row.where() else ""
    return f"{place}{row.name}: reference {row.reference}, found {row.found}{gap}"


def _missing(row: ParityRow) -> str:
    side = "the run" if row.found == MISSING else "the reference"
    return f"step {row.step}: {row.name} is silently missing in {side}"
