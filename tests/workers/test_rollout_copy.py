"""The full copy a replica decodes on when weights are sharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from corral.batch import Batch
from corral.engine.rank import Rank
from corral.workers.worker import Worker
from tests.engine.ranks import on_ranks
from tests.engine.small import write_model
from tests.plans import tiny_plan


def pushed(rank: Rank, folder: Path, out: Path) -> tuple[float, set[torch.dtype], bool]:
    """The gap on the probe after a push, the copy's dtypes, and whether it is the trainer's weights, rounded."""
    plan = tiny_plan(world=rank.world, path=str(folder))
    trainer = replace(plan.trainer, collective_check=False, run_dir=str(out))
    actor = replace(plan.actor, compute_dtype="bfloat16")
    worker = Worker(rank, replace(plan, actor=actor, critic=None, trainer=trainer), 1)
    worker.start_rollout((2,))
    assert worker._copy is not None
    with torch.no_grad():
        for p in worker._copy.module.parameters():
            p.zero_()
    probe = Batch.from_samples([[5, 9, 8]], [[4, 3, 7, 9]], row=[0], sample_index=[0], group=[0], finish=["stop"])
    gap = worker.push_weights(probe)
    held = dict(worker._copy.module.named_parameters())
    whole = dict(worker.engines["actor"].full_weights())
    same = all(torch.equal(held[name], whole[name].bfloat16()) for name in held)
    return gap, {p.dtype for p in held.values()}, same


def test_it_holds_what_a_sharded_forward_multiplies_with(tmp_path: Path) -> None:
    """Weights in the compute dtype: half the memory of a float32 copy, and nothing is cast at every step."""
    for gap, dtypes, same in on_ranks(2, pushed, write_model(tmp_path, "qwen3"), tmp_path):
        assert gap < 0.05
        assert dtypes == {torch.bfloat16}
        assert same
