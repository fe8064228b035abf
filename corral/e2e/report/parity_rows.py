"""The rows of a parity report that are worth showing, and the phases in the order in which a step makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from corral.e2e.result import ParityReport, ParityRow

PHASES = ("samples", "rewards", "log_probs", "values", "advantages", "gradients", "weights", "metrics")


@dataclass(frozen=True)
class PhaseSummary:
    """gap: the widest of the phase; None when nothing has one. state: equal, differs, first, or absent."""

    phase: str
    compared: int
    gap: float | None
    state: str


def phases(report: ParityReport) -> list[PhaseSummary]:
    """Every phase that was compared, and those known ones that were not."""
    named = [*PHASES, *sorted({row.phase for row in report.rows} | report.compared.keys())]
    return [_summary(report, phase) for phase in list(dict.fromkeys(named))[:40]]


def _summary(report: ParityReport, phase: str) -> PhaseSummary:
    rows = [row for row in report.rows if row.phase == phase]
    gaps = [row.gap for row in rows if row.gap is not None and not math.isnan(row.gap)]
    compared = report.compared.get(phase, 0)
    if report.first is not None and report.first.phase == phase:
        state = "first"
    elif not all(row.ok for row in rows):
        state = "differs"
    else:
        state = "equal" if rows or compared else "absent"
    return PhaseSummary(phase, compared, max(gaps, default=None), state)


def worth_showing(report: ParityReport, most: int) -> list[ParityRow]:
    """The first difference, then the other differences in the order of computation, then what is equal."""
    first = [report.first] if report.first is not None else []
    others = [row for row in report.rows if row != report.first]
    return [*first, *sorted(others, key=lambda row: row.ok)][:most]
