"""Baselines: what a case measured when somebody looked at it and agreed, kept in a file that is committed.

`baselines/<case>.json` beside the case file has the values of the metrics of expect.metrics.baseline at each step. A
run that leaves the tolerances is red until `corral e2e accept RESULT` takes its values, which a diff then shows.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral import atomic
from corral.e2e.case import Tolerance
from corral.e2e.metric_checks import Row, read_metrics
from corral.e2e.read import Found, find_cases
from corral.e2e.reading import Unreadable, nearest, read_json, read_text
from corral.e2e.result import Check, Result, read_result
from corral.errors import ConfigError

ACCEPT = "`corral e2e accept RESULT`"
Value = Annotated[float, Field(allow_inf_nan=False)]
Series = dict[int, float]  # step: value


class Baseline(BaseModel):
    """metrics: by name, the value at each step. corral, commit: of the run they were taken from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    case: str
    corral: str
    commit: str
    metrics: dict[str, dict[int, Value]]


def baseline_file(found: Found) -> Path:
    """Where the baseline of a case lies."""
    return found.file.parent / "baselines" / f"{found.case.name}.json"


def read_baseline(file: Path) -> Baseline | None:
    """None when there is no such file. Raises Unreadable for one that is no baseline."""
    if not file.exists():
        return None
    try:
        return Baseline.model_validate_json(read_text(file.parent, file.name))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise Unreadable(f"no baseline{f': {place}' if place else ''}: {' '.join(problem['msg'].split())}") from None


# Checking ------------------------------------------------------------------------------------------------------------


def baseline_checks(found: Found, records: Path) -> list[Check]:
    """One for each metric that the case compares with its baseline; none when it compares nothing."""
    tolerances = found.case.expect.metrics.baseline
    if not tolerances:
        return []
    file = baseline_file(found)
    try:
        baseline = read_baseline(file)
    except Unreadable as problem:
        return [_red(file.name, "a baseline", f"{problem}; restore it, or remove it and take a new one with {ACCEPT}")]
    if baseline is None:
        return [_red(file.name, "a committed baseline", f"no {_near(file)}; take it with {ACCEPT}")]
    try:
        rows = read_metrics(records)
    except Unreadable as problem:
        return [problem.check("baseline", "metrics.jsonl")]
    return [_check(name, within, baseline, rows) for name, within in tolerances.items()]


def _check(name: str, within: Tolerance, baseline: Baseline, rows: list[Row]) -> Check:
    if name not in baseline.metrics:
        near = nearest(name, baseline.metrics)
        return _red(name, "a baseline of it", f"none in {baseline.case}.json{near}; take it with {ACCEPT}")
    agreed, present = baseline.metrics[name], _series(name, rows)
    if not present:
        return _red(name, _words(within), f"nothing{nearest(name, {key for row in rows for key in row})}")
    steps = sorted(agreed.keys() | present.keys())
    wrong = [line for step in steps if (line := difference(step, agreed.get(step), present.get(step), within))]
    if not wrong:
        widest = max((abs(present[step] - agreed[step]) for step in steps), default=0.0)
        found = (
            f"as at all {len(steps)} steps, widest gap {widest:.3g}" if widest else f"equal at all {len(steps)} steps"
        )
        return Check(group="baseline", name=name, expected=_words(within), found=found, ok=True)
    more = f", and {len(wrong) - 1} of {len(steps)} steps more" if len(wrong) > 1 else ""
    detail = "\n".join([*wrong, f"If this is intended, {ACCEPT} takes the new values, for review in a commit."])
    return _red(name, _words(within), wrong[0] + more, detail)


def difference(step: int, agreed: float | None, present: float | None, within: Tolerance) -> str:
    """What is wrong at one step, or "". agreed: the baseline's value; present: the run's; None where there is none."""
    if agreed is None:
        return f"step {step}: {_shown(present)}, the baseline has no such step"
    if present is None:
        return f"step {step}: nothing, baseline {_shown(agreed)}"
    # A comparison with NaN is false, so that it is never within.
    if abs(present - agreed) <= within.atol + within.rtol * abs(agreed):
        return ""
    return f"step {step}: {_shown(present)}, baseline {_shown(agreed)} ({_change(agreed, present)})"


def _words(within: Tolerance) -> str:
    given = {"rtol": within.rtol, "atol": within.atol}
    return "the baseline" + "".join(f", {name} {value:g}" for name, value in given.items() if value)


def _red(name: str, expected: str, found: str, detail: str = "") -> Check:
    return Check(group="baseline", name=name, expected=expected, found=found, ok=False, detail=detail)


def _series(name: str, rows: list[Row]) -> Series:
    """The metric at the steps that have it; what is no number is NaN."""
    return {
        int(row["step"]): float(row[name]) if isinstance(row[name], int | float) else math.nan
        for row in rows
        if name in row and isinstance(row.get("step"), int)
    }


# Accepting -----------------------------------------------------------------------------------------------------------


def accept(args: argparse.Namespace) -> int:
    """`corral e2e accept RESULT [--dry-run]`. Raises ConfigError when there is nothing worth taking."""
    result = read_result(args.result)
    folder = args.result if args.result.is_dir() else args.result.parent
    records = folder / _records(result)
    found = _case(result, folder)
    new = _taken(result, found, records)
    file = baseline_file(found)
    try:
        old = read_baseline(file)
    except Unreadable as problem:
        raise ConfigError(f"{file}: {problem}; restore it with git, or remove it and accept again") from None
    changes = list(_changes(old.metrics if old else {}, new.metrics))
    if old is not None and not changes:
        print(f"{_near(file)} stays as it is: the values are equal")
        return 0
    _print_table(changes)
    if args.dry_run:
        print(f"{_near(file)} would change; without --dry-run it is written")
        return 0
    atomic.write_text(file, json.dumps(new.model_dump(), indent=1) + "\n")
    look = f"look at it with `git diff -- {_near(file)}`, then " if old else ""
    print(f"{_near(file)} is written: {look}commit it")
    return 0


def _records(result: Result) -> str:
    """Folder of the job's records. Raises ConfigError for a run that says nothing about its metrics."""
    other = [check for check in result.checks if not check.ok and check.group != "baseline"]
    only_baseline = not other and any(not check.ok for check in result.checks)
    if result.status != "PASSED" and not (result.status == "FAILED" and only_baseline):
        reason = str(other[0]) if other else result.reason
        raise ConfigError(
            f"{result.case} {result.status} for another reason than its baseline ({' '.join(reason.split())[:200]}); "
            "mend that, run it again, and accept that result"
        )
    if result.job is None:
        raise ConfigError(f"{result.case}: the result has no job, so there are no metrics to take")
    return result.job.records or "job"


def _case(result: Result, folder: Path) -> Found:
    """The case as it is now: of the file that ran, when that is here, else of that name. Raises ConfigError."""
    for place in (_file_that_ran(folder), result.case):
        for found in find_cases([place]) if place else ():
            if found.case.name == result.case:
                return found
    raise ConfigError(f"no case is called {result.case!r} here; run this in the project that has it")


def _file_that_ran(folder: Path) -> str | None:
    """What case.json names, unless the run was on another machine, or the file is gone."""
    try:
        file = read_json(folder, "case.json")["file"]
    except (Unreadable, KeyError, TypeError):
        return None
    return file if isinstance(file, str) and Path(file).is_file() else None


def _taken(result: Result, found: Found, records: Path) -> Baseline:
    """The baseline this run would be. Raises ConfigError for a metric that it does not have, or that is no number."""
    names = found.case.expect.metrics.baseline
    if not names:
        raise ConfigError(
            f"case {found.case.name} has no baseline: name metrics with their tolerances under expect.metrics.baseline "
            f"in {found.file}"
        )
    try:
        rows = read_metrics(records)
    except Unreadable as problem:
        raise ConfigError(f"{records / 'metrics.jsonl'}: {problem}") from None
    metrics = {}
    for name in names:
        metrics[name] = series = _series(name, rows)
        if not series:
            near = nearest(name, {key for row in rows for key in row})
            raise ConfigError(f"{records / 'metrics.jsonl'} has no {name}{near}; correct the case, or run it again")
        for step, value in series.items():
            if not math.isfinite(value):
                raise ConfigError(f"{name} is {value} at step {step}, which can be no baseline")
    return Baseline(case=found.case.name, corral=result.corral, commit=result.commit, metrics=metrics)


def _changes(before: Mapping[str, Series], after: Mapping[str, Series]) -> Iterator[tuple[int, str, str, str, str]]:
    """(step, metric, old, new, relative change) of every value that is not the same, by step."""
    keys = {(step, name) for side in (before, after) for name, series in side.items() for step in series}
    for step, name in sorted(keys):
        old, new = (side.get(name, {}).get(step) for side in (before, after))
        if old != new:
            change = "new" if old is None else "gone" if new is None else _change(old, new)
            yield step, name, _shown(old), _shown(new), change


def _print_table(changes: list[tuple[int, str, str, str, str]]) -> None:
    rows = [("step", "metric", "old", "new", "change"), *((str(step), *rest) for step, *rest in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _change(old: float, new: float) -> str:
    """`+2.5 %`, `-1.3e-07 %`; the difference itself from 0."""
    if not math.isfinite(new):
        return "no number"
    return f"{new:+.3g}" if old == 0 else f"{100 * (new - old) / abs(old):+.3g} %"


def _shown(value: float | None) -> str:
    """All its digits, as the file has them."""
    return "-" if value is None else repr(value)


def _near(file: Path) -> Path:
    """Relative to the working folder where it lies below it."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
