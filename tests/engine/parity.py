"""One training run of a small model on any world, and what it left: for tests that compare worlds and splits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from corral.batch import Batch
from corral.config.plan import MicroBatches
from corral.engine.engine import Engine
from corral.engine.packing import split
from corral.engine.rank import Rank
from tests.engine.small import engine_plan, objective, random_batch

STEPS = 3
TEMPERATURE = 0.8
ROWS = MicroBatches(48, None)  # tokens a row


@dataclass(frozen=True)
class Case:
    """One model and how its work is split."""

    folder: Path
    role: str = "actor"
    dtype: str = "float32"
    sp: int = 1
    checkpointing: bool = False
    reshard: bool = True
    limits: MicroBatches = ROWS
    fused: bool = False

    def alone(self) -> Case:
        """The same work in one process, split otherwise: one sample a row, no checkpointing."""
        return replace(self, sp=1, checkpointing=False, limits=MicroBatches(None, 1))


@dataclass(frozen=True)
class Outcome:
    """Results of scoring before training, then per step: statistics over all ranks, gradient norm; then all weights."""

    before: dict[str, Tensor]
    stats: list[dict[str, float]]
    grad_norms: list[float]
    skipped: list[bool]
    weights: dict[str, Tensor]
    micro_batches: int


def share_of(batch: Batch, engine: Engine, limits: MicroBatches) -> tuple[Batch, list[list[int]], list[int]]:
    """This rank's samples, their micro-batches, and which samples of the padded batch they are."""
    dp = engine.parallel.world // engine.parallel.sp
    cut = split(batch.lengths, dp, limits, True)
    mine = cut.shares[engine.parallel.dp_rank]
    picked = [i for row in mine for i in row]
    places = iter(range(len(picked)))
    return batch.padded(cut.padding).select(picked), [[next(places) for _ in row] for row in mine], picked


def total(stats: dict[str, float], world: int) -> dict[str, float]:
    """Sums over ranks, as the driver makes them."""
    if world == 1:
        return stats
    names = sorted(stats)
    sums = torch.tensor([stats[name] for name in names], dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))


def train(rank: Rank, case: Case, batch: Batch | None = None, spoil: int | None = None) -> Outcome:
    """Score, then STEPS optimizer steps on one batch. In step `spoil`, one sample's advantages are not finite."""
    dtype = getattr(torch, case.dtype)
    batch = random_batch(dtype=dtype) if batch is None else batch
    plan = engine_plan(
        case.folder,
        case.role,
        dtype=case.dtype,
        sp=case.sp,
        dp=rank.world // case.sp,
        checkpointing=case.checkpointing,
        reshard_after_forward=case.reshard,
        limits=case.limits,
        fused=case.fused,
    )
    engine = Engine(plan, rank, horizon=STEPS)
    share, micro, picked = share_of(batch, engine, case.limits)
    before = _in_order(batch, share, picked, engine.infer(share, micro, temperature=TEMPERATURE, entropy=True), engine)
    if rank.world > 1:  # scoring leaves no whole parameter behind
        assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    goal = objective(case.role, batch)
    steps = []
    for step in range(STEPS if spoil is None else STEPS + 1):
        given = _spoiled(share, picked) if step == spoil else share
        steps.append(engine.train_step(given, micro, goal, temperature=TEMPERATURE))
    return Outcome(
        before=before,
        stats=[total(step.stats, rank.world) for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        skipped=[step.skipped for step in steps],
        weights={name: weight.clone() for name, weight in engine.full_weights()},
        micro_batches=len(micro),
    )


def _spoiled(share: Batch, picked: list[int]) -> Batch:
    """The same samples with infinite advantages where the rank holds sample 1 of the batch; other ranks see nothing."""
    if 1 not in picked or share.advantages is None:
        return share
    at = share.sample_of_token == picked.index(1)
    return share.with_fields(advantages=share.advantages.masked_fill(at, torch.inf))


def _in_order(
    batch: Batch, share: Batch, picked: list[int], results: dict[str, Tensor], engine: Engine
) -> dict[str, Tensor]:
    """Results [R] of the whole batch from this rank's, and in a larger world from all other ranks'."""
    out = {}
    for name, values in results.items():
        whole = torch.zeros(batch.response_ids.numel(), dtype=values.dtype)
        for place, sample in enumerate(picked):
            if sample < len(batch):
                start, end = batch.response_offsets[sample], batch.response_offsets[sample + 1]
                whole[start:end] = values[share.response_offsets[place] : share.response_offsets[place + 1]]
        if engine.parallel.world > 1:
            if engine.parallel.sp_rank:
                whole.zero_()
            dist.all_reduce(whole)
        out[name] = whole
    return out


def train_all(rank: Rank, cases: list[Case]) -> list[Outcome]:
    return [train(rank, case) for case in cases]


def gaps(one: Outcome, other: Outcome) -> dict[str, float]:
    """Largest absolute difference of everything, by kind."""
    assert one.stats[0].keys() == other.stats[0].keys()
    assert one.weights.keys() == other.weights.keys()
    return {
        "before": max(_gap(one.before[name], other.before[name]) for name in one.before),
        "stats": max(abs(a[name] - b[name]) for a, b in zip(one.stats, other.stats, strict=True) for name in a),
        "grad_norm": max(abs(a - b) for a, b in zip(one.grad_norms, other.grad_norms, strict=True)),
        "weights": max(_gap(one.weights[name], other.weights[name]) for name in one.weights),
    }


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    return bool(torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=atol))
