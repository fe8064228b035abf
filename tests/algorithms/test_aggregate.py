from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.aggregate import AGGREGATIONS, Denominators, token_weights
from corral.batch import Batch
from tests.algorithms.ragged import MODES, flat, flat_mask, masks, offsets_of, rows_like
from tests.oracles import ppo


@settings(deadline=None)
@given(st.data(), st.sampled_from(MODES), st.integers(0, 40), st.integers(0, 9))
def test_weighted_sum_matches_the_oracle(data: st.DataObject, mode: str, other_tokens: int, other_samples: int) -> None:
    mask = data.draw(masks())
    rows = rows_like(data.draw, mask)
    denominators = Denominators(sum(map(sum, mask)) + other_tokens, len(mask) + other_samples)
    weights = token_weights(mode, flat_mask(mask), offsets_of(mask), denominators, 128.0, dtype=torch.float64)
    expected = ppo.aggregate(mode, rows, mask, denominators.tokens, denominators.samples, 128.0)
    assert (weights * flat(rows)).sum().item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert (weights[~flat_mask(mask)] == 0).all()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_a_local_denominator_gives_another_result(mode: str) -> None:
    mask = torch.tensor([True, True, True])
    offsets = torch.tensor([0, 1, 3])
    whole = token_weights(mode, mask, offsets, Denominators(tokens=9, samples=4), 16.0)
    local = token_weights(mode, mask, offsets, Denominators(tokens=3, samples=2), 16.0)
    assert not torch.allclose(whole, local)


def test_nothing_valid_anywhere_gives_zero_weights() -> None:
    for mode in MODES:
        weights = token_weights(
            mode, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 0, 2]), Denominators(0, 0), 1.0
        )
        assert weights.tolist() == [0, 0]


def test_a_fully_masked_sample_still_counts_as_a_sample() -> None:
    batch = Batch.from_samples(
        [[1], [2]], [[3], [4]], row=[0, 1], sample_index=[0, 0], group=[0, 1], finish=["stop", "stop"]
    )
    batch = batch.with_fields(response_mask=torch.tensor([True, False]))
    assert Denominators.of(batch) == Denominators(tokens=1, samples=2)
    assert Denominators.of(batch.padded(3)) == Denominators(tokens=1, samples=2)


def test_mistakes_are_named() -> None:
    mask, offsets = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    assert set(AGGREGATIONS) == set(MODES)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        token_weights("mean", mask, offsets, Denominators(1, 1), None)
    with pytest.raises(ValueError, match="needs a scale"):
        token_weights("seq-mean-token-sum-norm", mask, offsets, Denominators(1, 1), None)
