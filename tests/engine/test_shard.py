"""Dtypes and meshes: computing in bfloat16 over float32 weights, alone and sharded; combinations that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from corral.engine.distributed import connect, parallel
from corral.engine.engine import Engine
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.parity import Case, Outcome, share_of, train
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch


def half(rank: Rank, folder: Path) -> tuple[dict[str, Tensor], float, set[torch.dtype]]:
    """One bfloat16 step over float32 weights: statistics' loss, gradient norm, dtypes of the weights."""
    plan = engine_plan(folder, sp=rank.world, compute_dtype="bfloat16", checkpointing=True)
    engine = Engine(plan, rank, horizon=1)
    batch = random_batch()
    share, micro, picked = share_of(batch, engine, plan.infer)
    results = engine.infer(share, micro, entropy=True)
    step = engine.train_step(share, micro, objective("actor", batch))
    order = torch.tensor(picked).argsort()
    whole = {name: share.with_fields(values=x).select(order).values for name, x in results.items()}
    dtypes = {weight.dtype for _, weight in engine.full_weights()}
    return {name: x for name, x in whole.items() if x is not None}, step.grad_norm, dtypes


def assert_near(reference: Outcome, got: tuple[dict[str, Tensor], float, set[torch.dtype]]) -> None:
    results, grad_norm, dtypes = got
    assert dtypes == {torch.float32}
    assert results["log_probs"].dtype == torch.float32
    gap = (results["log_probs"] - reference.before["log_probs"]).abs()
    assert 1e-4 < float(gap.mean()) < 0.05  # bfloat16 keeps 8 bits: visible, and small
    assert grad_norm == pytest.approx(reference.grad_norms[0], rel=0.1)


def test_bfloat16_over_float32(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.parity.TEMPERATURE", 1.0)
    reference = train(Rank(), Case(models["qwen3"]))
    assert_near(reference, half(Rank(), models["qwen3"]))
    for rank in on_ranks(2, half, models["qwen3"]):
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
