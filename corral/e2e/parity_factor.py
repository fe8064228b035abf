"""What a wrong gradient looks like: a constant factor, each rank's own denominator, rounding, or one rank's part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from corral.e2e.case import Parity
from corral.e2e.parity_gap import numbers_equal
from corral.e2e.parity_records import Array, Facts, Summary, UpdateRecord

CONSTANT = 1e-6  # relative spread of ratios that are one factor
SLIGHT = 1e-3  # a factor this near to 1 is rounding
NEAR = 0.05  # of a degree: a mean of means, of ranks whose means are about alike
UNEVEN = 0.5  # of a tensor that no one factor explains, yet is mostly larger or smaller
MANY = 3  # groups of ranks among which one can stand out
FAR = 8.0  # times the typical distance of a part from the median of all parts


@dataclass(frozen=True)
class Ratio:
    """found / reference of one tensor. off: ‖found - ratio * reference‖ / ‖found‖, 0 when one factor explains all.
    apart: ‖found - reference‖ / ‖reference‖."""

    value: float
    off: float
    apart: float

    @classmethod
    def of(cls, reference: Array, found: Array) -> Self:
        import numpy as np

        a, b = reference.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
        with np.errstate(all="ignore"):
            square = float(a @ a)
            value = float(a @ b) / square if square else math.nan
            norm = float(np.linalg.norm(b))
            off = float(np.linalg.norm(b - value * a)) / norm if norm else math.nan
            apart = float(np.linalg.norm(b - a)) / math.sqrt(square) if square else math.nan
        return cls(value, off, apart)

    @classmethod
    def of_summaries(cls, reference: Summary, found: Summary) -> Self:
        if not reference.norm or not reference.dot:
            return cls(math.nan, math.nan, math.nan)
        by_norm, by_dot = found.norm / reference.norm, found.dot / reference.dot
        off = abs(by_dot / by_norm - 1) if by_norm else math.nan
        return cls(math.copysign(by_norm, by_dot), off, abs(by_norm - 1))


def factor_words(ratios: Sequence[Ratio], facts: Facts, role: str) -> list[str]:
    """Words on how the tensors of one optimizer step differ. ratios: of those that do."""
    known = [r for r in ratios if math.isfinite(r.value) and math.isfinite(r.off)]
    if not known or len(known) < len(ratios) / 2:
        return []
    typical = statistics.median(r.value for r in known)
    constant = all(abs(r.value - typical) <= CONSTANT * abs(typical) and r.off <= CONSTANT for r in known)
    if constant and abs(typical - 1) > SLIGHT and typical:
        return [_factor(typical, degrees(facts, role))]
    if statistics.median(r.off for r in known) <= UNEVEN and typical > 0 and abs(math.log(typical)) > UNEVEN:
        return [f"about {typical:.2g} times the reference, but by no one factor"]
    apart = statistics.median(r.apart for r in known)
    kind = "bfloat16 or float16" if 2e-4 <= apart <= 3e-2 else "float32" if 1e-9 <= apart <= 1e-5 else ""
    return [f"typically by {apart:.0e} of their size{f', as rounding to {kind} would' if kind else ''}"]


def statistics_words(reference: UpdateRecord, found: UpdateRecord, facts: Facts) -> list[str]:
    """Words on a mean that has become about as many times larger, or smaller, as there are ranks of one kind.

    Only of statistics to which no two ranks add with different signs: of the others a ratio says nothing.
    """
    here, there = reference.sums(), found.sums()
    for name in here.keys() & there.keys():
        parts = [part.stats.get(name, 0.0) for part in found.parts]
        one_sign = all(part >= 0 for part in parts) or all(part <= 0 for part in parts)
        if not (one_sign and here[name] and math.isfinite(there[name] / here[name])):
            continue
        ratio = there[name] / here[name]
        for what, degree in degrees(facts, found.role).items():
            if degree > 1 and any(abs(ratio / times - 1) <= NEAR for times in (degree, 1 / degree)):
                told = f"{name} is {_number(ratio)} times the reference, near {what}"
                return [f"{told}: each rank seems to divide by counts of its own"]
    return []


def degrees(facts: Facts, role: str) -> dict[str, int]:
    """By name, the numbers that a factor may turn out to be."""
    return {
        "the sequence-parallel degree": facts.sp.get(role, 1),
        "the data-parallel degree": facts.dp.get(role, 1),
        "the world size": facts.world,
    }


def _factor(typical: float, known: dict[str, int]) -> str:
    larger, smaller = ("found", "reference") if abs(typical) > 1 else ("reference", "found")
    size = abs(typical) if abs(typical) > 1 else 1 / abs(typical)
    text = f"one factor explains all: {larger} = {_number(math.copysign(size, typical))} * {smaller}"
    names = [what for what, degree in known.items() if degree > 1 and math.isclose(size, degree, rel_tol=CONSTANT)]
    return f"{text}, exactly {' and '.join(names)}" if names else text


def _number(value: float) -> str:
    return f"{value:.7g}"


def parts_words(reference: UpdateRecord, found: UpdateRecord, sp: int, parity: Parity) -> list[str]:
    """Words on a rank whose part of a statistic is out of line: against the same rank of a reference of as many ranks,
    else against the others, sequence-parallel groups of `sp` ranks taken together."""
    here = {part.rank: part.stats for part in reference.parts}
    there = {part.rank: part.stats for part in found.parts}
    words = []
    for name in dict.fromkeys(name for stats in there.values() for name in stats):
        parts = {rank: stats[name] for rank, stats in there.items() if name in stats}
        width = sp
        if here.keys() == there.keys():
            width = 1
            odd = [r for r, v in parts.items() if not numbers_equal(here[r].get(name, math.nan), v, parity)]
            odd = odd if len(odd) < len(parts) else []
        else:
            groups: dict[int, float] = {}
            for rank, value in parts.items():
                groups[rank - rank % sp] = groups.get(rank - rank % sp, 0.0) + value
            parts, odd = groups, _outliers(groups)
        words += [f"the part of {_ranks(rank, width)} of {name} stands out: {parts[rank]!r}" for rank in odd[:1]]
    return words[:2]


def _ranks(rank: int, width: int) -> str:
    return f"rank {rank}" if width == 1 else f"ranks {rank} to {rank + width - 1}"


def _outliers(parts: dict[int, float]) -> list[int]:
    """Those whose part is no number, or far from the median of all."""
    strange = [rank for rank, value in parts.items() if not math.isfinite(value)]
    if strange or len(parts) < MANY:
        return strange
    middle = statistics.median(parts.values())
    typical = statistics.median(abs(value - middle) for value in parts.values())
    return [rank for rank, value in parts.items() if typical and abs(value - middle) > FAR * typical]
