"""The attention function refuses whatever it does not implement; a context object decides the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

from corral.engine.attention import ATTENTION, CONTEXT, PackedAttention, attend
from corral.engine.model import build_model
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.small import engine_plan


class Layer(nn.Module):
    layer_idx = 0
    is_causal = True


def call(mask: Tensor | None = None, module: nn.Module | None = None, **kwargs: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 9, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    kwargs = {CONTEXT: PackedAttention((0, 4, 9)), **kwargs}
    return attend(module or Layer(), q, k, v, mask, **kwargs)[0]


def plain(q: Tensor, k: Tensor, v: Tensor, scaling: float, bounds: tuple[int, ...]) -> Tensor:
    """[1, L, H, D], one query at a time."""
    out = torch.zeros(1, q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype)
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        for at in range(q.shape[2]):
            start = max(b for b in bounds if b <= at)
            scores = (k[0, kv, start : at + 1] @ q[0, head, at]) * scaling
            out[0, at, head] = torch.softmax(scores, 0) @ v[0, kv, start : at + 1]
    return out


@pytest.mark.parametrize("scaling", [None, 0.11])
def test_against_one_query_at_a_time(scaling: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 9, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = plain(q, k, v, 8**-0.5 if scaling is None else scaling, (0, 4, 9))
    assert torch.allclose(call(scaling=scaling), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"sliding_window": 5}, "sliding_window=5"),
        ({"softcap": 50.0}, r"softcap=50\.0"),
        ({"s_aux": "sinks"}, "s_aux"),
        ({"dropout": 0.1}, "attention_dropout=0"),
        ({"is_causal": False}, "not causal"),
        ({"mask": torch.ones(1, 9)}, "attention mask"),
        ({"something_new": 1}, "something_new=1"),
    ],
)
def test_arguments_are_honoured_or_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call(**kwargs)


def test_arguments_that_say_nothing_pass() -> None:
    same = call(
        sliding_window=None, softcap=None, dropout=0.0, is_causal=True, position_ids=torch.arange(9), use_cache=False
    )
    assert torch.equal(same, call())


def test_a_module_that_is_not_causal_is_refused() -> None:
    module = Layer()
    module.is_causal = False
    with pytest.raises(ConfigError, match="not causal"):
        call(module=module)


def test_segments_have_to_cover_the_row() -> None:
    with pytest.raises(ValueError, match="9 tokens"):
        call(**{CONTEXT: PackedAttention((0, 4))})


SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4), "sliding_window=4"),
        (Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=None), "softcap"),
    ],
    ids=["mistral", "gemma 2"],
)
def test_real_models_are_refused_in_the_call_too(config: Any, named: str) -> None:
    """Even when nobody looked at the configuration."""
    if config.model_type == "gemma2":
        config.layer_types = ["full_attention"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with pytest.raises(ConfigError, match=named):
        model(torch.arange(6)[None], use_cache=False, **{CONTEXT: PackedAttention((0, 6))})


def test_a_two_dimensional_mask_does_not_silently_count(models: dict[str, Path]) -> None:
    """transformers drops it before the attention function; padded rows have no place in this path."""
    model = build_model(engine_plan(models["qwen3"]), Rank()).eval()
    ids = torch.tensor([[0, 0, 5, 6]])
    plain_row, masked = (
        model(ids, attention_mask=mask, use_cache=False, **{CONTEXT: PackedAttention((0, 4))}).logits
        for mask in (None, torch.tensor([[0, 0, 1, 1]]))
    )
    assert torch.equal(plain_row, masked)


def test_a_call_without_a_context_crashes(models: dict[str, Path]) -> None:
    model = build_model(engine_plan(models["qwen3"]), Rank())
    with pytest.raises(ValueError, match=CONTEXT):
        model(torch.arange(6)[None], use_cache=False)
