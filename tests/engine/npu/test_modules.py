"""Fused parts compute what the model's own did, forward and backward; what is not the plain form stays, by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from corral.engine.attention import CONTEXT, PackedAttention
from corral.engine.model import build_model
from corral.engine.npu_modules import FusedRMSNorm, FusedRotary, FusedSwiGLU, use_fused_modules
from corral.engine.rank import Rank
from tests.engine.npu.mapping import npu_on_cpu
from tests.engine.small import engine_plan

CPU = torch.device("cpu")
IDS = torch.randint(3, 90, (1, 11), generator=torch.Generator().manual_seed(4))


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for home in (modeling_llama, modeling_qwen3):  # put back what a test replaces
        monkeypatch.setattr(home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb)
    with npu_on_cpu() as module:
        yield module


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients."""
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    context = PackedAttention((0, 4, 11))
    logits = model(input_ids=IDS, position_ids=positions, use_cache=False, **{CONTEXT: context}).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_model_does_not_notice(architecture: str, models: dict[str, Path], standin: ModuleType) -> None:
    plain = build_model(engine_plan(models[architecture]), Rank())
    fused = copy.deepcopy(plain)
    before, expected = outcome(plain)
    norms = 2 * 2 + 1 + (4 if architecture == "qwen3" else 0)
    assert use_fused_modules(fused, CPU) == {"RMSNorm": norms, "SwiGLU": 2, "rotary embedding": 1}
    standin.CALLS.clear()
    after, gradients = outcome(fused)
    calls = {"npu_fusion_attention": 2, "npu_rms_norm": norms, "npu_swiglu": 2, "npu_rotary_mul": 4}
    assert calls == standin.CALLS
    assert float((after - before).abs().max()) < 1e-5
    assert gradients.keys() == expected.keys()
    assert max(float((gradients[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def test_mixed_dtypes_end_in_the_wider_one_as_in_the_model() -> None:
    """As under autocast: float32 weights meet bfloat16 activations."""
    own = modeling_qwen3.Qwen3RMSNorm(8, eps=1e-6)
    fused = FusedRMSNorm(own.weight, 1e-6)
    x = torch.linspace(-2, 3, 16).view(2, 8).bfloat16()
    assert fused(x).dtype == own(x).dtype == torch.float32
    assert torch.allclose(fused(x), own(x), rtol=1e-2)
    q, k = (torch.linspace(-1, 1, heads * 24).view(1, heads, 3, 8).bfloat16() for heads in (4, 2))
    cos, sin = torch.linspace(-1, 1, 24).view(1, 3, 8), torch.linspace(1, -1, 24).view(1, 3, 8)
    ours = FusedRotary(modeling_qwen3.apply_rotary_pos_emb, "cpu")(q, k, cos, sin)
    theirs = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_what_is_not_the_plain_form_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Gemma scales by 1 + weight; a GELU is not a SiLU; a bias in the product is neither."""
    config = modeling_llama.LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12, hidden_act="gelu")
    odd = Odd()
    model = nn.ModuleDict({"norm": Gemma2RMSNorm(8), "mlp": modeling_llama.LlamaMLP(config), "odd": odd})
    with caplog.at_level(logging.WARNING, logger="corral.engine.npu_modules"):
        assert use_fused_modules(model, CPU) == {"RMSNorm": 0, "SwiGLU": 0, "rotary embedding": 0}
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" is not ")[0] for line in said] == [
        "npu: norm (Gemma2RMSNorm)",
        "npu: mlp (LlamaMLP)",
        "npu: odd (Odd)",
    ]
    assert model["odd"] is odd


class Odd(nn.Module):
    """Looks like a SwiGLU from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + 1)
        return out


def test_a_kernel_that_computes_something_else_is_not_used(
    standin: ModuleType, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]
) -> None:
    """Tried on the device before it is trusted."""
    right: Any = standin.npu_swiglu
    monkeypatch.setattr(standin, "npu_swiglu", lambda x, dim=-1: right(x.flip(dim), dim))
    model = build_model(engine_plan(models["llama"]), Rank())
    assert use_fused_modules(model, CPU)["SwiGLU"] == 0


def test_the_rotation_of_tensors_elsewhere_is_the_models_own(standin: ModuleType) -> None:
    rotary = FusedRotary(modeling_qwen3.apply_rotary_pos_emb, "npu")
    q, k, cos = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    assert torch.equal(rotary(q, k, cos, cos)[0], modeling_qwen3.apply_rotary_pos_emb(q, k, cos, cos)[0])
    assert standin.CALLS == {}


def test_names_and_weights_stay(models: dict[str, Path]) -> None:
    model = build_model(engine_plan(models["qwen3"]), Rank())
    before = dict(model.named_parameters())
    use_fused_modules(model, CPU)
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(n, id(p)) for n, p in before.items()]
    assert any(isinstance(module, FusedSwiGLU) for module in model.modules())
