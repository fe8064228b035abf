"""The count behind MFU, against a count of the products themselves."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from corral.engine.flops import Dense

CONFIG = Qwen3Config(
    vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip


def test_products_of_a_forward_and_backward_pass() -> None:
    """The embedding is counted as a product, which it is not; attention as causal, of which eager computes the rest."""
    cost = Dense.of(CONFIG)
    assert cost is not None
    length = 24
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], use_cache=False).logits.sum().backward()
    embedding = 6 * CONFIG.vocab_size * CONFIG.hidden_size * length
    attention = 6 * CONFIG.num_hidden_layers * CONFIG.num_attention_heads * CONFIG.head_dim * length * length
    assert cost.training([length]) - embedding + attention == counter.get_total_flops()


def test_samples_add_up() -> None:
    cost = Dense.of(CONFIG)
    assert cost is not None
    assert cost.training([3, 5]) == cost.training([3]) + cost.training([5])
    assert cost.training([]) == 0


def test_a_model_with_experts_has_no_count() -> None:
    assert Dense.of(MixtralConfig()) is None
