"""The norms of a float64 model compute in float64 and are otherwise the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from corral.engine.model import build_model
from corral.engine.norm import use_full_precision_norms
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.small import engine_plan


def test_float64_sees_differences_that_float32_rounds_away() -> None:
    model = nn.ModuleDict({"norm": Qwen3RMSNorm(4, eps=1e-6).double()})
    with torch.no_grad():
        model["norm"].weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[0.3, -1.2, 2.0, 0.7]], dtype=torch.float64)
    moved = x + 1e-12
    rounded = model["norm"](x)
    assert torch.equal(rounded, model["norm"](moved))
    use_full_precision_norms(model)
    exact = model["norm"](x)
    assert torch.allclose(exact, rounded, rtol=1e-6)
    assert not torch.equal(exact, model["norm"](moved))
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]).double() * x / (x.square().mean() + 1e-6).sqrt()
    assert torch.allclose(exact, expected, rtol=1e-14)


def test_parameters_keep_their_names_and_values(models: dict[str, Path]) -> None:
    single, double = (
        build_model(engine_plan(models["qwen3"], dtype=dtype), Rank()) for dtype in ("float32", "float64")
    )
    assert [name for name, _ in single.named_parameters()] == [name for name, _ in double.named_parameters()]
    assert all(torch.equal(a.double(), b) for a, b in zip(single.parameters(), double.parameters(), strict=True))


def test_a_norm_of_another_kind_is_refused() -> None:
    """Gemma scales by 1 + weight."""
    with pytest.raises(ConfigError, match="Gemma2RMSNorm"):
        use_full_precision_norms(nn.ModuleDict({"norm": Gemma2RMSNorm(4).double()}))
