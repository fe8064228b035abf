"""One page and one summary over the runs of a call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from corral.e2e.report import text
from corral.e2e.report.html import Bad, Child, document, el, link, table
from corral.e2e.result import Result
from corral.job.client.github import as_code

Runs = Sequence[tuple[Result, Path]]


def index_page(runs: Runs, folder: Path) -> str:
    """Failed runs first; each line leads to the report in the run's folder."""
    failed = sum(result.status != "PASSED" for result, _ in runs)
    said = (
        f"{failed} of {text.count(len(runs), 'case')} failed" if failed else f"{text.count(len(runs), 'case')} passed"
    )
    total = text.seconds(sum(result.seconds for result, _ in runs))
    header = el(
        "header",
        el("p", el("span", "FAILED" if failed else "PASSED", class_="badge"), class_="verdict"),
        el("h1", said),
        el("ul", el("li", total), class_="chips"),
        class_="failed" if failed else "passed",
    )
    heads = ["", "case", "verdict", "checks", "time", "first thing that is wrong", "again"]
    rows = (_row(result, where, folder) for result, where in _ordered(runs))
    return document(said, [el("main", header, el("section", table(heads, rows, "checks")))], script=False)


def _row(result: Result, where: Path, folder: Path) -> list[Child]:
    good = result.status == "PASSED"
    report = Path(os.path.relpath(where / "report.html", folder)).as_posix()
    kind = f" ({text.line(result.failure_class, 40)})" if result.failure_class else ""
    cells: list[Child] = [
        el("span", "✓" if good else "✗", class_="mark"),
        link(report, text.line(result.case, 120)),
        f"{result.status}{kind}",
        f"{sum(check.ok for check in result.checks)} of {len(result.checks)}",
        text.seconds(result.seconds),
        text.line(result.reason) or "–",
        el("code", text.line(result.again, 500)) if result.again else "–",
    ]
    return cells if good else Bad(cells)


def summary(runs: Runs) -> str:
    """The same as Markdown."""
    lines = ["| | case | verdict | checks | time | first thing that is wrong |", "|---|---|---|---|---|---|"]
    for result, _ in _ordered(runs)[:500]:
        good = result.status == "PASSED"
        checks = f"{sum(check.ok for check in result.checks)} of {len(result.checks)}"
        reason = as_code(text.line(result.reason, 300)) if result.reason else "–"
        cells = [as_code(text.line(result.case, 120)), result.status, checks, text.seconds(result.seconds), reason]
        lines.append(f"| {'✅' if good else '❌'} | {' | '.join(cells)} |")
    if len(runs) > 500:
        lines.append(f"\nand {len(runs) - 500} more.")
    return "\n".join(lines) + "\n"


def _ordered(runs: Runs) -> list[tuple[Result, Path]]:
    return sorted(runs, key=lambda run: run[0].status == "PASSED")
