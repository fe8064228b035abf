"""Expectations on metrics.jsonl: how many lines, which numbers on each of them, and where they go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.e2e.case import Expect
from corral.e2e.reading import ABSENT, Unreadable, equal, nearest, read_text, word
from corral.e2e.result import Check

Row = dict[str, Any]


def read_metrics(records: Path) -> list[Row]:
    """The lines of metrics.jsonl. Raises Unreadable, which names the first broken line."""
    rows = []
    lines = read_text(records, "metrics.jsonl").split("\n")  # not splitlines: a text may hold U+2028
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=_int)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise Unreadable(f"line {number} is not a JSON object")
        rows.append(row)
    return rows


def metric_checks(expect: Expect, records: Path) -> Iterator[Check]:
    metrics = expect.metrics
    if expect.steps is None and not (metrics.finite or metrics.within or metrics.trend):
        return
    try:
        rows = read_metrics(records)
    except Unreadable as problem:
        yield problem.check("metrics", "metrics.jsonl")
        return
    if expect.steps is not None:
        yield equal("metrics", "steps", expect.steps, len(rows))
    if not rows:
        if metrics.finite or metrics.within or metrics.trend:
            yield Unreadable("an empty file").check("metrics", "metrics.jsonl")
        return
    for name in metrics.finite:
        yield _on_every_line(name, rows, -math.inf, math.inf, "a finite number")
    for name, (low, high) in metrics.within.items():
        yield _on_every_line(name, rows, low, high, f"{low:g}" if low == high else f"{low:g} to {high:g}")
    for name, way in metrics.trend.items():
        yield _trend(name, rows, way)


def _on_every_line(name: str, rows: list[Row], low: float, high: float, expected: str) -> Check:
    """The first line that breaks the bound, else the last line's value."""
    found = ""
    for number, row in enumerate(rows, start=1):
        value = row.get(name, ABSENT)
        found = _shown(name, value, row)
        if not _is_number(value) or not low <= value <= high:
            return Check(group="metrics", name=name, expected=expected, found=f"{found} on line {number}", ok=False)
    return Check(group="metrics", name=name, expected=expected, found=found, ok=True)


def _trend(name: str, rows: list[Row], way: str) -> Check:
    """The mean of the last third of the lines against that of the first, so that one odd step decides nothing."""
    if len(rows) < 2:
        return Check(group="metrics", name=name, expected=way, found="one line, and a trend needs two", ok=False)
    for number, row in enumerate(rows, start=1):
        if not _is_number(value := row.get(name, ABSENT)):
            found = f"{_shown(name, value, row)} on line {number}"
            return Check(group="metrics", name=name, expected=way, found=found, ok=False)
    third = max(1, len(rows) // 3)
    first = math.fsum(row[name] / third for row in rows[:third])
    last = math.fsum(row[name] / third for row in rows[-third:])
    ok = last > first if way == "rises" else last < first
    found = f"{first:g} to {last:g} (means of the first and the last {third} of {len(rows)} lines)"
    return Check(group="metrics", name=name, expected=way, found=found, ok=ok)


def _int(digits: str) -> int | float:
    """An integer that no float can hold is infinite."""
    return int(digits) if len(digits) < 300 else float(digits)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _shown(name: str, value: object, row: Row) -> str:
    if value is ABSENT:
        return f"nothing{nearest(name, row)}"
    return f"{value:.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else word(value)
