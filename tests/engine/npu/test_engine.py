"""A whole engine on the NPU's path trains as on the CPU's: attention, norms, SwiGLU and rotary embedding by the fused
kernels, in one process and in two that share their sequences."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from corral.engine.engine import Engine
from corral.engine.rank import Rank
from tests.engine.npu.mapping import npu_on_cpu
from tests.engine.parity import Case, Outcome, gaps, share_of, train
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch


@pytest.fixture(autouse=True)
def rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what an engine replaces in the model's module."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_qwen3.apply_rotary_pos_emb)


def on_npu(rank: Rank, case: Case) -> tuple[Outcome, dict[str, int]]:
    """The outcome and how often each fused kernel was called."""
    with npu_on_cpu() as standin:
        done = train(replace(rank, device="npu"), replace(case, fused=True))
        return done, dict(standin.CALLS)


def check(npu: Outcome, cpu: Outcome) -> None:
    found = gaps(npu, cpu)
    assert max(found["before"], found["stats"], found["grad_norm"]) < 1e-5
    assert found["weights"] < 1e-4  # Adam divides gradients near its eps by their own size


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_one_process(role: str, models: dict[str, Path]) -> None:
    case = Case(models["qwen3"], role=role, checkpointing=True)
    cpu = train(Rank(), case)
    npu, calls = on_npu(Rank(), case)
    check(npu, cpu)
    assert set(calls) == {"npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"}


def test_two_ranks_that_share_sequences(models: dict[str, Path]) -> None:
    case = Case(models["qwen3"], sp=2)
    expected = train(Rank(), case.alone())
    for npu, calls in on_ranks(2, on_npu, case):
        check(npu, expected)
        assert calls["npu_fusion_attention"] > 0


def gradients(folder: Path, fused: bool) -> dict[str, Tensor]:
    """Of the first optimizer step, by parameter."""
    engine = Engine(engine_plan(folder, fused=fused), Rank(device="npu" if fused else "cpu"), horizon=1)
    batch = random_batch()
    share, micro, _ = share_of(batch, engine, engine.plan.infer)
    done = engine.train_step(share, micro, objective("actor", batch), record="full")
    return {name: tensor.whole for name, tensor in done.gradients.items() if tensor.whole is not None}


def test_every_gradient(models: dict[str, Path]) -> None:
    cpu = gradients(models["qwen3"], fused=False)
    with npu_on_cpu():
        npu = gradients(models["qwen3"], fused=True)
    assert npu.keys() == cpu.keys()
    assert len(cpu) > 20
    assert max(float((npu[name] - cpu[name]).abs().max()) for name in cpu) < 1e-5


def test_bfloat16_compute_as_on_a_device(models: dict[str, Path]) -> None:
    """float32 weights under autocast: every kernel is handed one dtype, and the loss is that of the CPU to rounding."""
    batch = random_batch()
    values = []
    for fused in (False, True):
        with npu_on_cpu() if fused else nullcontext():
            plan = engine_plan(models["qwen3"], compute_dtype="bfloat16", fused=fused)
            engine = Engine(plan, Rank(device="npu" if fused else "cpu"), horizon=1)
            share, micro, _ = share_of(batch, engine, engine.plan.infer)
            values.append(engine.infer(share, micro)["log_probs"])
    assert float((values[0] - values[1]).abs().max()) < 0.1
