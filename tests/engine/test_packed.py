"""A packed row holds the samples' tokens, restarts positions, and knows which position predicts which token."""

from __future__ import annotations

import pytest
import torch

from corral.batch import Batch
from corral.engine.packed import pack
from tests.engine.small import random_batch


def two_samples() -> Batch:
    return Batch.from_samples(
        [[10, 11], [20]],
        [[12, 13, 14], [21, 22]],
        row=[0, 1],
        sample_index=[0, 0],
        group=[0, 1],
        finish=["stop", "length"],
    )


def test_by_hand() -> None:
    row = pack(two_samples(), [1, 0], multiple=3)
    assert row.input_ids.tolist() == [[20, 21, 22, 10, 11, 12, 13, 14, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert row.cu_seqlens == (0, 3, 8, 9)
    assert row.predict_at.tolist() == [0, 1, 4, 5, 6]
    assert row.token_at.tolist() == [3, 4, 0, 1, 2]
    assert row.targets.tolist() == [21, 22, 12, 13, 14]


def test_no_tail_when_the_length_fits() -> None:
    assert pack(two_samples(), [0, 1], multiple=4).cu_seqlens == (0, 5, 8)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_slices_cover_the_row_once(parts: int) -> None:
    batch = random_batch(7)
    row = pack(batch, [3, 0, 6, 5], multiple=parts)
    slices = [row.slice(part, parts) for part in range(parts)]
    assert torch.equal(torch.cat([s.input_ids for s in slices], dim=1), row.input_ids)
    assert torch.equal(torch.cat([s.position_ids for s in slices], dim=1), row.position_ids)
    assert len({s.input_ids.shape for s in slices}) == 1
    assert sorted(torch.cat([s.token_at for s in slices]).tolist()) == sorted(row.token_at.tolist())
    for s in slices:
        assert torch.equal(s.targets, batch.response_ids[s.token_at])
        assert s.cu_seqlens == row.cu_seqlens
    width = row.input_ids.shape[1] // parts
    placed = torch.cat([s.predict_at + width * part for part, s in enumerate(slices)])
    assert torch.equal(placed.sort().values, row.predict_at.sort().values)


def test_each_prediction_sits_before_its_token() -> None:
    batch = random_batch(9)
    row = pack(batch, range(9), multiple=4)
    assert torch.equal(row.input_ids[0, row.predict_at + 1], row.targets)
    assert row.token_at.tolist() == list(range(batch.response_ids.numel()))


def test_an_empty_prompt_is_refused() -> None:
    batch = Batch.from_samples([[]], [[5]], row=[0], sample_index=[0], group=[0], finish=["stop"])
    with pytest.raises(ValueError, match="empty prompt"):
        pack(batch, [0])
