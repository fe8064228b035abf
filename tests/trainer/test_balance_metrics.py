"""How tokens lie on ranks, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from corral.batch import Batch
from corral.config.plan import MicroBatches
from corral.trainer.metrics import balance_metrics
from tests.plans import tiny_engine

LENGTHS = [9, 1, 1, 1, 5, 3]  # response tokens; every prompt has one


def batch() -> Batch:
    count = len(LENGTHS)
    return Batch.from_samples(
        [[7]] * count,
        [[5] * length for length in LENGTHS],
        row=range(count),
        sample_index=[0] * count,
        group=range(count),
        finish=["stop"] * count,
    )


@pytest.mark.parametrize("limits", [MicroBatches(64, None), MicroBatches(None, 1)])
def test_two_ranks_in_runs_and_balanced(limits):
    engine = replace(tiny_engine(world=2), infer=limits)
    assert balance_metrics(batch(), engine, balance=True) == {
        "global_seqlen/min": 12,  # 2 + 6 + 4
        "global_seqlen/max": 14,  # 10 + 2 + 2
        "global_seqlen/minmax_diff": 2,
        "global_seqlen/balanced_min": pytest.approx(13, abs=1),
        "global_seqlen/balanced_max": pytest.approx(13, abs=1),
        "global_seqlen/mean": 13,
    }
    as_runs = balance_metrics(batch(), engine, balance=False)
    assert (as_runs["global_seqlen/balanced_min"], as_runs["global_seqlen/balanced_max"]) == (12, 14)


def test_peers_of_a_sequence_group_count_once_and_no_op_samples_never():
    found = balance_metrics(batch().select([0]), tiny_engine(world=8, sp=2), balance=True)
    assert (found["global_seqlen/min"], found["global_seqlen/max"], found["global_seqlen/mean"]) == (0, 10, 2.5)
    assert (found["global_seqlen/balanced_min"], found["global_seqlen/balanced_max"]) == (0, 10)


def test_alone_everything_is_on_one_rank():
    found = balance_metrics(batch(), tiny_engine(), balance=True)
    total = float(torch.tensor(LENGTHS).sum()) + len(LENGTHS)
    assert set(found.values()) == {total, 0.0}
