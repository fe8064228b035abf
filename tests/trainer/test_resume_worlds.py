"""From one process to two nodes of two ranks and back: going on does not depend on who wrote the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.workers.local_cluster import LocalCluster
from tests.trainer.checkpoints import STEPS, assert_same_checkpoint, from_path, measured, resumable
from tests.trainer.parity import IGNORED
from tests.trainer.runs import Inputs, samples, train, train_here

SPLIT = [
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
]


@pytest.mark.slow
def test_one_process_then_four_ranks_then_one_process(inputs: Inputs, tmp_path: Path):
    straight, many, back = (tmp_path / name for name in ("straight", "many", "back"))
    assert train_here(resumable(inputs, straight)) == 0
    with LocalCluster.start(nodes=2, devices_per_node=2, resource="CPU") as cluster:
        overrides = resumable(inputs, many, *SPLIT, *from_path(straight / "global_step_1"))
        split = train(overrides, {"RAY_ADDRESS": cluster.address})
    assert split.returncode == 0, split.stderr
    assert train_here(resumable(inputs, back, *from_path(many / "global_step_3"))) == 0
    for step, folder in ((2, many), (3, many), (4, many), (4, back)):
        assert_same_checkpoint(straight, folder, step, atol=1e-9)
        ours, theirs = (samples(run, step) for run in (straight, folder))
        assert [row["response_ids"] for row in ours] == [row["response_ids"] for row in theirs]
        expected, found = measured(straight)[step], measured(folder)[step]
        assert expected.keys() == found.keys()
        for name in expected:
            if not name.startswith(IGNORED):
                assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name
    assert list(measured(many)) == list(range(2, STEPS + 1))
