"""Metrics of both runs, step by step: the same names, the same values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from corral.e2e.case import Parity
from corral.e2e.parity_gap import SINGLE, Comparison, distance, numbers_equal
from corral.e2e.reading import as_number, cut
from corral.e2e.result import ParityRow

MISSING = "silently missing"
# What may differ between a run and its reference, by prefix, and why.
IGNORED = {
    "timing": "wall-clock",
    "perf/": "wall-clock and throughput",
    "actor/perf/": "memory of a machine",
    "critic/perf/": "memory of a machine",
    "global_seqlen/": "how tokens lie on ranks",
    "critic/advantages/mean": "zero by construction once advantages are whitened: nothing but rounding",
    "rollout/probe_gap": "rounding between engine and trainer",
    "rollout/replayed": "where the samples came from; they are compared themselves",
    "training/rollout_": "rounding between engine and trainer",
}
# Further ones where a case allows for single precision (rtol of 1e-6 or more).
ROUNDING = {"rollout_corr/": "rounding between engine and trainer, which single precision leaves visible"}


def ignored(parity: Parity) -> tuple[str, ...]:
    """Prefixes of the metrics that are not compared."""
    rounding = ROUNDING if parity.rtol >= SINGLE else {}
    return (*IGNORED, *rounding, *parity.ignore)


def compare_metrics(step: int, here: dict[str, Any], there: dict[str, Any], parity: Parity) -> Iterator[Comparison]:
    """One row a metric, in the order in which the reference wrote them."""
    skip = ignored(parity)
    for name in dict.fromkeys([*here, *there]):
        if name.startswith(skip):
            continue
        sides = [repr(side[name]) if name in side else MISSING for side in (here, there)]
        a, b = as_number(here.get(name)), as_number(there.get(name))
        width: float | None = None
        ok = False
        if a is not None and b is not None:
            ok, width = numbers_equal(a, b, parity), distance(a, b)
        elif MISSING not in sides:
            ok = sides[0] == sides[1]  # a text, or a list
            width = 0.0 if ok else None
        here_shown, there_shown = map(cut, sides)
        row = ParityRow(
            step=step, phase="metrics", name=name, reference=here_shown, found=there_shown, gap=width, ok=ok
        )
        evidence = [] if ok or a is None or b is None else _relative(a, b)
        yield Comparison(row, 1, cause=MISSING if MISSING in sides else "metrics", evidence=evidence)


def _relative(a: float, b: float) -> list[str]:
    if not a or not math.isfinite(b / a):
        return []
    return [f"found is {b / a:.7g} times the reference"]
