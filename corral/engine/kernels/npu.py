"""Packed attention with Ascend's fused kernel, torch_npu.npu_fusion_attention, in its packed layout (TND).

Interface and limits are those of the manual in torch_npu 2.13, which names the Atlas A2 series. The kernel brings its
backward pass and reads grouped key/value heads as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from corral.engine.device import plugin
from corral.engine.kernels.segments import Segments
from corral.errors import ConfigError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZE = 768
HEADS = 256
TOKENS = 1 << 20  # of one call
SEGMENTS = 1024  # of one call; a longer row is cut between segments

_RIGHT_DOWN_CAUSAL = 3  # sparse mode: causal, aligned at the last query and key, mask given in compressed form
_MASK = 2048  # edge of the compressed causal mask


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """Shapes as `kernels.attend`. ConfigError names what is beyond the kernel's limits."""
    _refuse(q, k, v)
    bounds = segments.bounds
    if len(bounds) <= SEGMENTS + 1:
        return _call(q, k, v, bounds, scaling)
    parts = []
    for first in range(0, len(bounds) - 1, SEGMENTS):
        part = bounds[first : first + SEGMENTS + 1]
        rows = slice(part[0], part[-1])
        parts.append(_call(q[rows], k[rows], v[rows], tuple(bound - part[0] for bound in part), scaling))
    return torch.cat(parts)


def _call(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scaling: float) -> Tensor:
    ends = list(bounds[1:])  # where each segment ends; the kernel wants no leading 0
    outputs: tuple[Any, ...] = _torch_npu().npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        head_num=q.shape[1],
        input_layout="TND",
        atten_mask=_causal_mask(q.device),
        scale=scaling,
        keep_prob=1.0,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=_RIGHT_DOWN_CAUSAL,
    )
    out: Tensor = outputs[0]
    return out


def _refuse(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ConfigError for what the kernel does not do; it would fail on the device with a number instead of a reason."""
    names = [str(x.dtype).removeprefix("torch.") for x in (q, k, v)]
    if len(set(names)) > 1 or q.dtype not in DTYPES:
        raise ConfigError(
            f"npu attention: query, key and value are {', '.join(names)}; the kernel takes one of float32, bfloat16 "
            "and float16 for all of them"
        )
    size, value_size = q.shape[2], v.shape[2]
    if size > HEAD_SIZE or value_size > size:
        raise ConfigError(
            f"npu attention: heads of {size} (values {value_size}); the kernel takes at most {HEAD_SIZE}, and values "
            "no wider than keys"
        )
    if q.shape[1] > HEADS:
        raise ConfigError(f"npu attention: {q.shape[1]} heads on one rank; the kernel takes at most {HEADS}")
    if q.shape[0] > TOKENS:
        raise ConfigError(
            f"npu attention: a row of {q.shape[0]} tokens; the kernel takes at most {TOKENS}: lower the token budget"
        )


@cache
def _causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048] bool, true where nothing is seen. The kernel reads it for segments of any length."""
    return torch.triu(torch.ones(_MASK, _MASK, dtype=torch.bool, device=device), diagonal=1)


def _torch_npu() -> Any:
    return plugin("npu")
