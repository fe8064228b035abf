"""What was found before the run, on the page: failures first, then bandwidth of each pair as a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from corral.e2e.report import text
from corral.e2e.report.html import Bad, Child, Element, el, folded, table
from corral.findings import Finding

MOST_ROWS, WIDEST = 400, 32


def preflight(findings: Sequence[Finding]) -> list[Child]:
    bad = [finding for finding in findings if not finding.ok]
    good = [finding for finding in findings if finding.ok]
    parts: list[Child] = []
    if bad:
        parts.append(_table(bad))
    else:
        parts.append(el("p", f"{text.count(len(good), 'finding')}, all as expected."))
    pairs = [finding for finding in findings if _ends(finding) and finding.value is not None]
    for check, unit in dict.fromkeys((finding.check, finding.unit) for finding in pairs):
        of = [finding for finding in pairs if (finding.check, finding.unit) == (check, unit)]
        parts += _matrix(f"{check}, {unit}" if unit else check, of)
    if good:
        parts.append(folded(f"{text.count(len(good), 'finding')} as expected", _table(good)))
    return parts


def _table(findings: Sequence[Finding]) -> Element:
    rows = [_row(finding) for finding in findings[:MOST_ROWS]]
    shown = table(["check", "where", "expected", "found", "what to do"], rows)
    if len(findings) > MOST_ROWS:
        return el("div", shown, el("p", f"{len(findings) - MOST_ROWS} more are in the records only", class_="note"))
    return shown


def _row(finding: Finding) -> list[Child]:
    mark = "✓ " if finding.ok else "✗ "
    value = "" if finding.value is None else f" ({finding.value:.4g} {finding.unit})".replace(" )", ")")
    said = finding.found if finding.value is None or f"{finding.value:.4g}" in finding.found else finding.found + value
    cells: list[Child] = [
        mark + text.line(finding.check, 80),
        finding.where() or "everywhere",
        text.line(finding.expected),
        text.line(said),
        text.line(finding.fix) or "–",
    ]
    return cells if finding.ok else Bad(cells)


def _ends(finding: Finding) -> tuple[int, int] | None:
    """The two ranks, or the two nodes, that a finding is about."""
    end = finding.rank if finding.rank is not None else finding.node
    return None if end is None or finding.peer is None else (end, finding.peer)


def _matrix(title: str, findings: Sequence[Finding]) -> list[Child]:
    cells = {ends: finding for finding in findings if (ends := _ends(finding))}
    names = sorted({end for ends in cells for end in ends})
    kind = "rank" if findings[0].rank is not None else "node"
    middle = median(finding.value or 0.0 for finding in findings)
    left_out = len(names) - WIDEST
    shown = names[:WIDEST]
    # One value a pair: it holds both ways, unless the other way has its own.
    body = [
        el(
            "tr",
            el("th", str(row), scope="row"),
            (_cell(cells.get((row, column)) or cells.get((column, row)), middle) for column in shown),
        )
        for row in shown
    ]
    head = el("tr", el("th", kind, class_="corner"), (el("th", str(name), scope="col") for name in shown))
    matrix = el("div", el("table", el("thead", head), el("tbody", body), class_="matrix"), class_="wide")
    parts: list[Child] = [el("h3", text.line(title)), matrix]
    if left_out > 0:
        parts.append(el("p", f"{left_out} further {kind}s are in the records only", class_="note"))
    return parts


def _cell(finding: Finding | None, middle: float) -> Element:
    """Shaded by how far below the usual it is; what is not as expected is marked too."""
    if finding is None or finding.value is None:
        return el("td", "·", class_="none")
    share = finding.value / middle if middle > 0 else 1.0
    shade = "s0" if share >= 0.75 else "s1" if share >= 0.5 else "s2" if share >= 0.25 else "s3"
    value = f"{finding.value:.0f}" if abs(finding.value) >= 10 else f"{finding.value:.2g}"
    return el(
        "td",
        value if finding.ok else f"✗ {value}",
        title=text.line(finding.line()),
        class_=shade if finding.ok else f"{shade} bad",
    )
