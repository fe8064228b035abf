"""Attention plugged into transformers models through their public attention interface.

A model built with `attn_implementation=ATTENTION` calls `attend` in every layer. What attention means for the call at
hand (packed rows, sequence parallel, cached decoding) is decided by the context object that the caller passes to the
model's forward as the keyword argument `CONTEXT`; transformers hands unknown keyword arguments through to the
attention function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import AttentionInterface

from corral.engine import kernels
from corral.engine.sequence_parallel import SequenceParallel
from corral.errors import ConfigError

ATTENTION = "corral"
CONTEXT = "attention_context"

# Keyword arguments that carry nothing an attention context has to honour. Everything else a model passes is refused by
# name unless it is None: an argument that is ignored silently gives logits that are wrong but look right.
_HARMLESS = frozenset({CONTEXT, "scaling", "position_ids", "use_cache"})


class AttentionContext(Protocol):
    """One way to attend. Shapes: q [B, H, L, D]; k, v [B, Hkv, L, D]; result [B, L, H, D]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor: ...


@dataclass(frozen=True)
class PackedAttention:
    """Causal attention within each segment of one packed row; no sample sees another.

    cu_seqlens: bounds of the segments of the whole row, first 0, last its length. With sequence parallelism q, k and
    v hold this rank's slice of the row (L / sp tokens, all heads) and so does the result; in between the rank attends
    over the whole row with H / sp heads (Ulysses, Jacobs et al. 2023).
    """

    cu_seqlens: tuple[int, ...]
    sp: SequenceParallel | None = None
    kernel: kernels.Attend = kernels.attend

    @cached_property
    def segments(self) -> kernels.Segments:
        return kernels.Segments(self.cu_seqlens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if self.sp is not None:
            q, k, v = self.sp.to_heads(q, k, v)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = self.kernel(q, k, v, self.segments, scaling)
        if self.sp is not None:
            return self.sp.to_sequence(out.transpose(0, 1)[None])
        return out[None]


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers calls; refuses by name whatever it would otherwise silently get wrong.

    ConfigError: a mask, an argument no context implements (sliding_window, softcap, s_aux, ...), dropout, attention
    that is not causal.
    """
    context: AttentionContext | None = kwargs.get(CONTEXT)
    if context is None:
        raise ValueError(f"a model with attention {ATTENTION!r} was called without {CONTEXT}")
    _refuse(module, attention_mask, kwargs)
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return context.attend(cast(int, module.layer_idx), query, key, value, scaling), None


def _refuse(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """ConfigError that names the first thing this path does not implement."""
    where = f"attention of {type(module).__name__}"
    if attention_mask is not None:
        raise ConfigError(f"{where}: an attention mask was passed; rows are packed and need none")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{where} is not causal; only causal language models can be trained")
    if kwargs.get("dropout"):
        raise ConfigError(
            f"{where} drops out with p={kwargs['dropout']}; results would depend on how samples are packed: "
            "set override_config.attention_dropout=0"
        )
    for name, value in kwargs.items():
        if name not in _HARMLESS and name not in ("dropout", "is_causal") and value is not None:
            raise ConfigError(f"{where} uses {name}={value!r}, which Corral's attention does not implement")


AttentionInterface.register(ATTENTION, attend)
