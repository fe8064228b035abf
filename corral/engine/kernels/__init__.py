"""Causal attention over the segments of one packed row, by device type.

Every kernel is a function `attend(q, k, v, segments, scaling)`: q [L, H, D], k and v [L, G, D] with H a multiple of G
(query head h reads key/value head h // (H / G)), result [L, H, D]; differentiable; no segment sees another.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from corral.engine.kernels import npu, sdpa
from corral.engine.kernels.segments import Segments

__all__ = ["Segments", "attend"]

_BY_DEVICE: dict[str, Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]] = {"npu": npu.attend}
"""Device type → its kernel; any other device makes one SDPA call a segment."""


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """Attention by the kernel of the device q is on. Shapes as above."""
    if q.shape[0] != segments.bounds[-1]:
        raise ValueError(f"the row has {q.shape[0]} tokens, its segments end at {segments.bounds[-1]}")
    return _BY_DEVICE.get(q.device.type, sdpa.attend)(q, k, v, segments, scaling)
