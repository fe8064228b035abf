"""Expectations against records. What a run printed is never looked at: only its exit status, the files it left and the
processes it left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.e2e.case import Case


@dataclass(frozen=True)
class Facts:
    """What is known of a run that has ended. leftovers: a line for each process that was still there."""

    exit_code: int
    run_dir: Path
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """One expectation and what was found instead or as expected, each in a few words."""

    name: str
    expected: str
    found: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


def evaluate(case: Case, facts: Facts) -> list[Check]:
    """Every expectation of the case, the most telling first. Broken or missing records are findings, not errors."""
    expect = case.expect
    checks = [_equal("exit code", expect.exit_code, facts.exit_code)]
    checks += _plan_checks(case, facts)
    checks += _metric_checks(case, facts)
    if expect.rank_logs:
        checks.append(_rank_logs(case, facts))
    checks.append(_equal("processes left", 0, len(facts.leftovers), "; ".join(facts.leftovers)))
    return checks


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Raises OSError, or ValueError that names the first broken line."""
    rows = []
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of metrics.jsonl is not a JSON object")
        rows.append(row)
    return rows


def _equal(name: str, expected: object, found: object, detail: str = "") -> Check:
    # 1 == True and 4 == 4.0 in Python; a plan that says True where 1 is expected is wrong.
    ok = expected == found and isinstance(expected, bool) == isinstance(found, bool)
    return Check(name, _word(expected), _word(found) + (f" ({detail})" if detail else ""), ok)


def _word(value: object) -> str:
    return json.dumps(value, default=str)


def _plan_checks(case: Case, facts: Facts) -> Iterator[Check]:
    if not case.expect.plan:
        return
    try:
        plan = json.loads((facts.run_dir / "plan.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield Check("plan.json", "written", "no such file", False)
        return
    except ValueError as error:
        yield Check("plan.json", "JSON", str(error), False)
        return
    for path, expected in case.expect.plan.items():
        found: Any = plan
        for part in path.split("."):
            found = found.get(part, _ABSENT) if isinstance(found, dict) else _ABSENT
        if found is _ABSENT:
            yield Check(f"plan {path}", _word(expected), "nothing", False)
        else:
            yield _equal(f"plan {path}", expected, found)


_ABSENT = object()


def _metric_checks(case: Case, facts: Facts) -> Iterator[Check]:
    expect = case.expect
    if expect.lines is None and not expect.finite and not expect.within:
        return
    try:
        rows = read_metrics(facts.run_dir)
    except FileNotFoundError:
        yield Check("metrics.jsonl", "written", "no such file", False)
        return
    except ValueError as error:
        yield Check("metrics.jsonl", "one JSON object a line", str(error), False)
        return
    if expect.lines is not None:
        yield _equal("lines of metrics.jsonl", expect.lines, len(rows))
    if not rows and (expect.finite or expect.within):
        yield Check("metrics.jsonl", "metrics", "an empty file", False)
        return
    for name in expect.finite:
        yield _on_every_line(name, rows, -math.inf, math.inf, "a finite number")
    for name, (low, high) in expect.within.items():
        yield _on_every_line(name, rows, low, high, f"{low:g}" if low == high else f"{low:g} to {high:g}")


def _on_every_line(name: str, rows: list[dict[str, Any]], low: float, high: float, expected: str) -> Check:
    """The first line that breaks the bound, else the last line's value."""
    found = ""
    for number, row in enumerate(rows, start=1):
        value = row.get(name, _ABSENT)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        found = "nothing" if value is _ABSENT else f"{value:g}" if is_number else _word(value)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            return Check(name, expected, f"{found} on line {number}", False)
    return Check(name, expected, found, True)


def _rank_logs(case: Case, facts: Facts) -> Check:
    topology = case.topology
    assert topology is not None  # read_case refuses rank_logs without one
    each = topology.devices_per_node
    names = [f"logs/node-{rank // each}/rank-{rank}.log" for rank in range(topology.nodes * each)]
    missing = [name for name in names if not (facts.run_dir / name).is_file()]
    found = f"{len(names) - len(missing)}" + (f" (no {missing[0]})" if missing else "")
    return Check("rank logs", f"{len(names)}", found, not missing)
