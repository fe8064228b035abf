"""Floating-point operations of a dense transformer, by the formula this family of trainers reports MFU with.

A forward and backward pass over samples of L tokens is 6 · N · ΣL for the weights and 6 · layers · heads · head_dim ·
ΣL² for causal attention. N counts the weights of the layers, and embeddings and output head as if both were matrix
products over every token. What gradient checkpointing computes again does not count: it is use that is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class Dense:
    """weights: N of the module's formula; attention: layers · heads · head_dim."""

    weights: int
    attention: int

    def training(self, lengths: Sequence[int]) -> float:
        """Operations of one forward and backward pass over samples of these lengths, in tokens."""
        return 6.0 * (self.weights * sum(lengths) + self.attention * sum(length * length for length in lengths))

    @staticmethod
    def of(config: PreTrainedConfig) -> Dense | None:
        """Of a model by its configuration; None for one that is not dense or does not state its sizes."""
        text = config.get_text_config()
        if any(getattr(text, name, None) for name in _EXPERTS):
            return None
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        inner = getattr(text, "intermediate_size", None)
        if inner is None:
            return None
        attention = text.hidden_size * head_dim * (heads + 2 * kv_heads) + heads * head_dim * text.hidden_size
        layer = 3 * text.hidden_size * inner + attention
        return Dense(
            weights=text.num_hidden_layers * layer + 2 * text.vocab_size * text.hidden_size,
            attention=text.num_hidden_layers * heads * head_dim,
        )
