"""Two arrays against each other: how many entries are not equal, and where the widest gap lies.

Equal: |found - reference| <= atol + rtol * |reference|. What is not finite is equal to nothing, on both sides too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from corral.e2e.case import Parity
from corral.e2e.parity_records import Array
from corral.e2e.result import ParityRow

# From this rtol on the two sides may be in single precision.
SINGLE = 1e-6


@dataclass(frozen=True)
class Gap:
    """bad: [N] bool, entries that are not equal (of a tensor judged as a whole: all or none of them). at: where the
    widest gap lies, among those that are not equal if there are any. width: None when it is no number."""

    bad: Array
    at: int
    width: float | None

    @property
    def ok(self) -> bool:
        return not bool(self.bad.any())


@dataclass(frozen=True)
class Comparison:
    """One row of the report and what is known of it. numbers: compared. name: key of CAUSES. evidence: which entries
    differ, in words. tensors: names in the records, to dump."""

    row: ParityRow
    numbers: int
    cause: str
    evidence: list[str] = field(default_factory=list)
    tensors: tuple[str, ...] = ()


def gap(reference: Array, found: Array, parity: Parity) -> Gap:
    """Entry by entry; shapes are equal and there is at least one entry. Whole numbers have to be the same."""
    import numpy as np

    reference, found = reference.reshape(-1), found.reshape(-1)
    if reference.dtype.kind in "iub" and found.dtype.kind in "iub":
        bad = reference != found
        distance = np.abs(reference.astype(np.float64) - found.astype(np.float64))
    else:
        a, b = reference.astype(np.float64), found.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(b - a)
            bad = ~(distance <= parity.atol + parity.rtol * np.abs(a)) | ~np.isfinite(a) | ~np.isfinite(b)
    return _widest(bad, distance)


def tensor_gap(reference: Array, found: Array, parity: Parity) -> Gap:
    """Of a gradient or a weight: entry by entry in float64, else by the norm of the difference.

    In lower precision an entry whose gradient is all rounding gets a full step of its sign from Adam, so single entries
    say nothing: ‖found - reference‖ <= atol + rtol * ‖reference‖.
    """
    import numpy as np

    if reference.dtype == np.float64 and found.dtype == np.float64:
        return gap(reference, found, parity)
    a, b = reference.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(b - a)
        equal = bool(np.linalg.norm(b - a) <= parity.atol + parity.rtol * np.linalg.norm(a))
    whole = np.full(a.shape, not (equal and math.isfinite(float(np.linalg.norm(a)))))
    return _widest(whole, distance)


def _widest(bad: Array, distance: Array) -> Gap:
    import numpy as np

    strange = bad & ~np.isfinite(distance)
    if strange.any():
        return Gap(bad, int(strange.argmax()), None)
    at = int(np.where(bad, distance, -1.0).argmax() if bad.any() else distance.argmax())
    return Gap(bad, at, float(distance[at]))


def numbers_equal(reference: float, found: float, parity: Parity, scale: float | None = None) -> bool:
    """scale: what rtol is relative to, when that is not the reference itself."""
    if not (math.isfinite(reference) and math.isfinite(found)):
        return False
    return abs(found - reference) <= parity.atol + parity.rtol * (abs(reference) if scale is None else scale)


def distance(reference: float, found: float) -> float | None:
    """None when it is no number."""
    width = abs(found - reference)
    return width if math.isfinite(width) else None


def failing(step: int, phase: str, name: str, reference: Any, found: Any, cause: str = "") -> Comparison:
    """A row that is not equal for want of something to compare."""
    row = ParityRow(step=step, phase=phase, name=name, reference=str(reference), found=str(found), gap=None, ok=False)
    return Comparison(row, numbers=0, cause=cause or name)
