"""Parity on the page: the first divergence on top, then every phase, then the quantities."""

from __future__ import annotations

from collections.abc import Iterable

from corral.e2e.report import text
from corral.e2e.report.html import Bad, Child, el, folded, link, pairs, table
from corral.e2e.report.parity_rows import PhaseSummary, phases, worth_showing
from corral.e2e.result import ParityReport, ParityRow

MOST_ROWS = 400
OPEN_ROWS = 12  # further differences follow from the first: they are folded
_SAID = {"equal": "equal", "differs": "differs", "first": "differs first", "absent": "not compared"}


def comparison(report: ParityReport) -> list[Child]:
    parts: list[Child] = []
    if report.first is not None:
        parts.append(_first(report, report.first))
    else:
        total = sum(report.compared.values())
        parts.append(el("p", f"{total:,} numbers are equal to those of the reference run within the tolerance."))
    parts.append(el("ol", (_phase(phase) for phase in phases(report)), class_="phases"))
    rows = worth_showing(report, MOST_ROWS)
    differing = [row for row in rows if not row.ok]
    equal = [row for row in rows if row.ok]
    if differing:
        parts.append(_rows(differing[:OPEN_ROWS]))
    if len(differing) > OPEN_ROWS:
        parts.append(folded(f"Further differences: {len(differing) - OPEN_ROWS}", _rows(differing[OPEN_ROWS:])))
    if equal:
        parts.append(folded(f"Equal quantities: {len(equal)}", _rows(equal)))
    if len(report.rows) > len(rows):
        parts.append(el("p", f"{len(report.rows) - len(rows)} further rows are in result.json only", class_="note"))
    return parts


def _first(report: ParityReport, first: ParityRow) -> Child:
    facts: list[tuple[str, Child]] = [
        ("phase", first.phase),
        ("quantity", el("code", first.name)),
        ("where", first.where() or "the whole run"),
        ("reference", el("code", first.reference)),
        ("found", el("code", first.found)),
        ("gap", text.number(first.gap)),
    ]
    if report.hint:
        facts.append(("look at", report.hint))
    if report.dumped:
        inside = not report.dumped.startswith("/") and ".." not in report.dumped
        facts.append(("both sides", link(f"{report.dumped}/", report.dumped) if inside else el("code", report.dumped)))
    return el(
        "div",
        el("h3", "First difference"),
        pairs(facts),
        class_="first",
    )


def _phase(phase: PhaseSummary) -> Child:
    gap = f"gap ≤ {phase.gap:.2g}" if phase.gap is not None else ""
    return el(
        "li",
        el("b", phase.phase),
        el("span", f"{phase.compared:,} {'number' if phase.compared == 1 else 'numbers'}" if phase.compared else "–"),
        el("span", gap),
        el("em", _SAID[phase.state]),
        class_=phase.state,
    )


def _rows(rows: Iterable[ParityRow]) -> Child:
    heads = ["step", "phase", "quantity", "where", "reference", "found", "gap"]
    return table(heads, (_row(row) for row in rows), "parity")


def _row(row: ParityRow) -> list[Child]:
    cells: list[Child] = [
        str(row.step) if row.step else "–",
        row.phase,
        el("code", text.line(row.name, 200)),
        row.model_copy(update={"step": 0}).where() or "–",
        el("code", text.line(row.reference, 200)),
        el("code", text.line(row.found, 200)),
        text.number(row.gap),
    ]
    return cells if row.ok else Bad(cells)
