"""Packed attention on NVIDIA GPUs: PyTorch's own variable-length kernel, or that of flash-attn.

Both are the FlashAttention-2 algorithm (Dao, 2023): half precision, heads of at most 256, compute capability 8.0. They
read grouped key/value heads as they are and bring their backward pass. What is beyond them is computed by one SDPA call
a segment, which is said once: float32 and float64 in particular, the dtypes of comparisons.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from corral.engine.kernels import sdpa
from corral.engine.kernels.segments import Segments
from corral.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
HEAD_SIZE = 256
CAPABILITY = (8, 0)  # Ampere


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """By torch.nn.attention.varlen. Shapes as `kernels.attend`."""
    if _left_to_sdpa(q):
        return sdpa.attend(q, k, v, segments, scaling)
    from torch.nn.attention import varlen  # registers its operators, which costs a second

    compute: Callable[..., object] = varlen.varlen_attn
    if q.shape[1] != k.shape[1] and _told_of_groups():
        compute = partial(compute, enable_gqa=True)
    offsets, longest = segments.offsets(q.device), segments.longest
    out = compute(
        *(q, k, v, offsets, offsets, longest, longest),
        scale=scaling,
        window_size=(-1, 0),  # any number of keys before the query, none after it
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _told_of_groups() -> bool:
    """Whether PyTorch's function has to be told that heads are grouped. That of torch 2.11 is not, and cannot be."""
    operator = torch.ops.torch_attn._varlen_attn.default
    return any(argument.name == "enable_gqa" for argument in operator._schema.arguments)


def attend_flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """By the flash-attn package. Shapes as `kernels.attend`."""
    if _left_to_sdpa(q):
        return sdpa.attend(q, k, v, segments, scaling)
    offsets, longest = segments.offsets(q.device), segments.longest
    out: Tensor = importlib.import_module("flash_attn").flash_attn_varlen_func(
        *(q, k, v, offsets, offsets, longest, longest),
        softmax_scale=scaling,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def require_flash() -> None:
    """Raises ConfigError when flash-attn is not installed here."""
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "override_config.attn_implementation=flash_attention_2: flash-attn is not installed on this node; install "
            "it, or leave the key out for PyTorch's own kernel, which is the same algorithm"
        )


def _left_to_sdpa(q: Tensor) -> bool:
    """Whether q [L, H, D] is beyond the kernels."""
    reason = _beyond(q.dtype, q.shape[2], q.device)
    if reason is not None:
        _say(reason)
    return reason is not None


@cache
def _beyond(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    if dtype not in DTYPES:
        return f"is in half precision only, and this is {str(dtype).removeprefix('torch.')}"
    if head_size > HEAD_SIZE or head_size % 8:
        return f"takes heads of at most {HEAD_SIZE} in steps of 8, and these are {head_size}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        capability = ".".join(str(part) for part in torch.cuda.get_device_capability(device))
        return (
            f"needs compute capability {'.'.join(str(part) for part in CAPABILITY)}, and this device has {capability}"
        )
    return None


@cache
def _say(reason: str) -> None:
    """Once for each reason: every layer comes by here."""
    log.warning("the variable-length attention kernel %s: one SDPA call a segment instead", reason)
