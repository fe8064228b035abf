"""Dtypes and meshes: computing in bfloat16 over float32 weights, alone and sharded; combinations that cannot run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corral.engine.distributed import connect, parallel
from corral.engine.engine import Engine
from corral.engine.rank import Rank
from corral.errors import ConfigError
from corral.platform import CPU
from tests.engine.parity import Case, Outcome, share_of, train
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch


@dataclass(frozen=True)
class Half:
    """A bfloat16 step over float32 weights. dtypes: of weights, gradients, optimizer state and loss, by name."""

    results: dict[str, Tensor]
    grad_norm: float
    dtypes: dict[str, set[torch.dtype]]
    weights: dict[str, Tensor]


def half(rank: Rank, folder: Path, role: str = "actor") -> Half:
    plan = engine_plan(folder, role, sp=rank.world, compute_dtype="bfloat16", checkpointing=True)
    engine = Engine(plan, rank, horizon=1)
    batch = random_batch()
    share, micro, picked = share_of(batch, engine, plan.infer)
    results = engine.infer(share, micro, entropy=True)
    seen: dict[str, set[torch.dtype]] = {"gradient": set(), "loss": set(), "forward": set()}
    for p in engine.module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen["gradient"].add(p.grad.dtype))
    goal = objective(role, batch)

    class Watched:
        needs_entropy = goal.needs_entropy
        token_weights = staticmethod(goal.token_weights)

        def __call__(self, predicted: Any, tokens: Any) -> Any:
            loss, stats = goal(predicted, tokens)
            seen["loss"] |= {loss.dtype, *(x.dtype for x in predicted.values())}
            return loss, stats

    layer = next(m for name, m in engine.module.named_modules() if name.endswith("layers.0.mlp.down_proj"))
    layer.register_forward_hook(lambda module, inputs, out: seen["forward"].add(out.dtype))
    step = engine.train_step(share, micro, Watched())
    assert engine.optimizer is not None
    seen["state"] = {x.dtype for s in engine.optimizer.state.values() for x in s.values()}
    weights = {name: weight.clone() for name, weight in engine.full_weights()}
    seen["weights"] = {weight.dtype for weight in weights.values()}
    order = torch.tensor(picked).argsort()
    whole = {name: share.with_fields(values=x).select(order).values for name, x in results.items()}
    return Half({name: x for name, x in whole.items() if x is not None}, step.grad_norm, seen, weights)


def assert_near(reference: Outcome, got: Half) -> None:
    name = "values" if "values" in got.results else "log_probs"
    assert got.dtypes.pop("forward") == {torch.bfloat16}
    assert got.dtypes == {kind: {torch.float32} for kind in ("gradient", "loss", "state", "weights")}
    assert got.results[name].dtype == torch.float32
    gap = (got.results[name] - reference.before[name]).abs()
    assert 1e-4 < float(gap.mean()) < 0.05  # bfloat16 keeps 8 bits: visible, and small
    assert got.grad_norm == pytest.approx(reference.grad_norms[0], rel=0.1)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_bfloat16_over_float32(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Only products are in bfloat16: weights, gradients, moments, log-probs, values and the loss are not."""
    monkeypatch.setattr("tests.engine.parity.TEMPERATURE", 1.0)
    reference = train(Rank(), Case(models["qwen3"], role))
    assert_near(reference, half(Rank(), models["qwen3"], role))
    for rank in on_ranks(2, half, models["qwen3"], role):
        assert_near(reference, rank)


def test_dtypes_that_do_not_go_together(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="cannot compute in float64 with float32 weights"):
        Engine(engine_plan(models["llama"], compute_dtype="float64"), Rank(), horizon=1)


def test_sequence_parallel_has_to_divide_the_world() -> None:
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=3 does not divide the 4 devices"):
        parallel(Rank(0, 4, master="127.0.0.1:1"), 3)


def test_a_world_of_one_has_no_process_group() -> None:
    connect(Rank())
    assert not torch.distributed.is_initialized()
    at = parallel(Rank(), 1)
    assert (at.mesh, at.sequence, at.sp_rank, at.dp_rank) == (None, None, 0, 0)


def places(rank: Rank) -> list[tuple[int, int, list[int]]]:
    """(dp_rank, sp_rank, ranks of the sequence group) for two models with different degrees on one world."""
    out = []
    for sp in (2, 4):
        at = parallel(rank, sp)
        assert at.sequence is not None
        out.append((at.dp_rank, at.sp_rank, torch.distributed.get_process_group_ranks(at.sequence.group)))
    return out


def test_adjacent_ranks_share_a_sequence() -> None:
    assert on_ranks(4, places) == [
        [(0, 0, [0, 1]), (0, 0, [0, 1, 2, 3])],
        [(0, 1, [0, 1]), (0, 1, [0, 1, 2, 3])],
        [(1, 0, [2, 3]), (0, 2, [0, 1, 2, 3])],
        [(1, 1, [2, 3]), (0, 3, [0, 1, 2, 3])],
    ]


def reduced_on_the_host(rank: Rank) -> tuple[str, list[float]]:
    """Backends of a sequence group, and a sum over it of a tensor on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.engine.distributed.platform", lambda device: replace(CPU, backend="cpu:gloo,cuda:gloo"))
        sequence = parallel(rank, 2).sequence
    assert sequence is not None
    x = torch.tensor([float(rank.rank)])
    torch.distributed.all_reduce(x, group=sequence.group)
    return torch.distributed.get_backend_config(sequence.group), x.tolist()


def test_the_group_of_a_device_reduces_tensors_of_the_host_too() -> None:
    """Subgroups have the backends of the world: results of scoring are on the CPU, where NCCL would refuse them."""
    sums = [[1.0], [1.0], [5.0], [5.0]]
    assert on_ranks(4, reduced_on_the_host) == [("cpu:gloo,cuda:gloo", x) for x in sums]
