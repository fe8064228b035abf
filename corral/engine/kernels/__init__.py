"""Causal attention over the segments of one packed row, by device type.

Every kernel is a function `attend(q, k, v, segments, scaling)`: q [L, H, D], k and v [L, G, D] with H a multiple of G
(query head h reads key/value head h // (H / G)), result [L, H, D]; differentiable; no segment sees another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from corral.engine.kernels import npu, sdpa, varlen
from corral.engine.kernels.segments import Segments

__all__ = ["Attend", "Segments", "attend", "kernel"]

Attend = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]

_BY_DEVICE: dict[str, Attend] = {"cuda": varlen.attend, "npu": npu.attend}
"""Device type → its kernel; any other device makes one SDPA call a segment."""


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """Attention by the kernel of the device q is on."""
    return kernel(q.device.type)(q, k, v, segments, scaling)


def kernel(device: str, choice: str = "auto") -> Attend:
    """The kernel of a device type: auto, or for cuda by choice flash_attention_2 (flash-attn) or sdpa.

    ConfigError: flash-attn is not installed.
    """
    if choice == "flash_attention_2":
        varlen.require_flash()
        return _checked(varlen.attend_flash)
    return _checked(sdpa.attend if choice == "sdpa" else _BY_DEVICE.get(device, sdpa.attend))


def _checked(compute: Attend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
        if q.shape[0] != segments.bounds[-1]:
            raise ValueError(f"the row has {q.shape[0]} tokens, its segments end at {segments.bounds[-1]}")
        return compute(*_in_one_dtype(q, k, v), segments, scaling)

    return attend


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, what it would compute in: a norm may hand over another dtype than a projection, and autocast
    knows the operators of PyTorch alone."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(x.to(dtype) for x in tensors)
    q, k, v = tensors
    return q, k, v
