"""Attention plugged into transformers models through their public attention interface.

A model built with `attn_implementation=ATTENTION` calls `attend` in every layer. What attention means for the call at hand
(packed rows, sequence parallel, cached decoding) is decided by the context object that the caller passes to the model's
forward as the keyword argument `CONTEXT`; transformers hands unknown keyword arguments through to the attention function.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "corral"
CONTEXT = "attention_context"


class AttentionContext(Protocol):
    """One way to attend. Shapes: q [B, H, L, D]; k, v [B, Hkv, L, D]; result [B, L, H, D]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor: ...


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers calls; refuses by name whatever it would otherwise silently get wrong."""
    context: AttentionContext | None = kwargs.get(CONTEXT)
    if context is None:
        raise ValueError(f"a model with attention {ATTENTION!r} was called without {CONTEXT}")
    scaling = kwargs.get("scaling")
    return context.attend(
        module.layer_idx, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling
    ), None


AttentionInterface.register(ATTENTION, attend)
