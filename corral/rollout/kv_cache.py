"""Keys and values of the sequences being decoded, and the two ways a model attends while generating.

Legend: B sequences, H query heads, Hkv key/value heads, T tokens of a packed row, D head size.
A slot holds one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from corral.engine import kernels


@dataclass(frozen=True)
class CacheLayout:
    """What one token costs in the cache of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> CacheLayout:
        """The layout for a transformers causal LM that computes in `dtype`."""
        config = module.config.get_text_config()  # type: ignore[union-attr, operator]
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=next(module.parameters()).device,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Preallocated keys and values: [layers, 2 (key, value), slots, Hkv, length, D].

    Live sequences lie in the first slots without gaps, so decoding reads one view and gathers nothing. Starts as zeros:
    a masked position is multiplied by weight 0, which only a finite number survives.
    """

    def __init__(self, layout: CacheLayout, slots: int, length: int) -> None:
        shape = (layout.layers, 2, slots, layout.kv_heads, length, layout.head_dim)
        self.store = torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    @property
    def slots(self) -> int:
        return self.store.shape[2]

    @property
    def length(self) -> int:
        """Tokens a slot can hold."""
        return self.store.shape[4]

    @property
    def device(self) -> torch.device:
        return self.store.device

    def fits(self, slots: int, length: int, device: torch.device) -> bool:
        """Whether it is on `device` and has that many slots of that many tokens."""
        return self.slots >= slots and self.length >= length and self.device == device

    def clear(self) -> None:
        """Zeros again, so that nothing of an earlier call (NaN of a broken model, say) can reach a later one."""
        self.store.zero_()

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot into another."""
        self.store[:, :, target, :, :tokens] = self.store[:, :, source, :, :tokens]


@dataclass(frozen=True)
class Segment:
    """One prompt of a packed row, at [start, end), and the slots that begin with it."""

    start: int
    end: int
    slots: tuple[int, ...]


class PrefillAttention:
    """Packed prompts [1, T]: each attends causally to itself alone and is written to its slots."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self.cache = cache
        self.segments = segments
        self._bounds = kernels.Segments((0, *(segment.end for segment in segments)))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [1, H, T, D]; k, v [1, Hkv, T, D]; result [1, T, H, D]."""
        keys, values = self.cache.store[layer]
        for segment in self.segments:
            at = slice(segment.start, segment.end)
            tokens = segment.end - segment.start
            for slot in segment.slots:
                keys[slot, :, :tokens] = k[0, :, at]
                values[slot, :, :tokens] = v[0, :, at]
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return kernels.attend(q, k, v, self._bounds, scaling)[None]


class DecodeAttention:
    """One token per sequence [B, 1]: writes it to slot b at positions[b] and attends to that slot up to it."""

    def __init__(self, cache: KVCache, positions: Tensor, width: int) -> None:
        """positions [B] int64: tokens in each slot before this one, less than `width`."""
        self.cache = cache
        self.positions = positions
        self.slots = torch.arange(positions.numel(), device=positions.device)
        self.width = width
        seen = torch.arange(width, device=positions.device) <= positions[:, None]
        self.mask = seen[:, None, None, :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q [B, H, 1, D]; k, v [B, Hkv, 1, D]; result [B, 1, H, D]."""
        batch, heads, _, size = q.shape
        keys, values = self.cache.store[layer, :, :batch]
        # Under autocast a norm may hand over another dtype than the one the attention kernel computes in.
        keys[self.slots, :, self.positions] = k[:, :, 0].to(keys.dtype)
        values[self.slots, :, self.positions] = v[:, :, 0].to(values.dtype)
        # The query heads that share a key head become the queries of one attention: nothing is repeated.
        kv_heads = k.shape[1]
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, size)
        out = scaled_dot_product_attention(
            grouped,
            keys[:, :, : self.width],
            values[:, :, : self.width],
            attn_mask=self.mask.expand(-1, 1, grouped.shape[2], -1),
            scale=scaling,
        )
        return out.reshape(batch, 1, heads, size)
