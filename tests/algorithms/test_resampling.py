from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.kl_control import next_coefficient
from corral.algorithms.resampling import METHODS, resample, weights
from tests.oracles import resampling as oracle

scores_lists = st.lists(st.sampled_from([0.0, 0.0, 1.0, -2.0, 0.3, 5.0]), min_size=1, max_size=9)


@settings(deadline=None)
@given(scores_lists, st.sampled_from(METHODS), st.sampled_from([0.0, 1.0, 2.0, 3.5]))
def test_weights_are_proportional_to_the_oracles(scores: list[float], method: str, power: float) -> None:
    got = weights(torch.tensor(scores, dtype=torch.float64), method, power)
    expected = torch.tensor([oracle.weight(scores, i, method, power) for i in range(len(scores))], dtype=torch.float64)
    torch.testing.assert_close(got / got.sum(), expected / expected.sum(), rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(scores_lists, st.sampled_from(METHODS), st.integers(0, 2**40), st.data())
def test_as_many_voters_are_drawn_as_there_are_samples(
    scores: list[float], method: str, seed: int, data: st.DataObject
) -> None:
    votes = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    known = torch.tensor([s if v else float("nan") for s, v in zip(scores, votes, strict=True)])
    drawn = resample(known, torch.tensor(votes), method, 2.0, seed, 3)
    assert drawn.shape == (len(scores),)
    voters = [i for i, v in enumerate(votes) if v]
    if not voters:
        assert drawn.tolist() == list(range(len(scores)))
        return
    mine = [scores[i] for i in voters]
    possible = {i for k, i in enumerate(voters) if oracle.weight(mine, k, method, 2.0) > 0}
    assert set(drawn.tolist()) <= possible


@pytest.mark.parametrize("method", METHODS)
def test_shares_follow_the_weights(method: str) -> None:
    scores = torch.tensor([1.0, -2.0, 0.5, 2.0] * 5000)
    drawn = resample(scores, torch.ones(scores.numel(), dtype=torch.bool), method, 2.0, 7, 1)
    share = torch.bincount(drawn % 4, minlength=4) / scores.numel()
    expected = weights(scores[:4].double(), method, 2.0)
    # Four standard deviations of a share at 20 000 draws.
    torch.testing.assert_close(share.double(), expected / expected.sum(), rtol=0, atol=4 * 0.5 / 20000**0.5)


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    scores, votes = torch.arange(1.0, 65.0), torch.ones(64, dtype=torch.bool)
    first = resample(scores, votes, "pow", 2.0, 1, 1)
    torch.manual_seed(99)
    assert torch.equal(first, resample(scores, votes, "pow", 2.0, 1, 1))
    assert not torch.equal(first, resample(scores, votes, "pow", 2.0, 1, 2))
    assert not torch.equal(first, resample(scores, votes, "pow", 2.0, 2, 1))


def test_large_scores_do_not_overflow_and_all_zero_scores_are_drawn_evenly() -> None:
    votes = torch.ones(3, dtype=torch.bool)
    assert set(resample(torch.tensor([1e300, 0.0, 0.0], dtype=torch.float64), votes, "pow", 5.0, 0, 0).tolist()) == {0}
    assert weights(torch.zeros(3), "pow", 2.0).tolist() == [1.0, 1.0, 1.0]


def test_unknown_methods_and_negative_powers_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown reweight method 'best'"):
        weights(torch.ones(2), "best", 2.0)
    with pytest.raises(ValueError, match="negative"):
        weights(torch.ones(2), "pow", -1.0)


@given(st.floats(0, 10), st.floats(-1, 50), st.integers(0, 9999), st.floats(1e-3, 10))
def test_the_coefficient_equals_the_oracle(coefficient: float, mean_kl: float, samples: int, target: float) -> None:
    got = next_coefficient(coefficient, mean_kl, samples, target, 10000)
    assert got == pytest.approx(oracle.next_coefficient(coefficient, mean_kl, samples, target, 10000), rel=1e-12)
    assert got >= 0


def test_the_coefficient_rises_above_the_target_falls_below_and_stays_at_it() -> None:
    assert next_coefficient(0.5, 0.1, 64, 0.1, 10000) == 0.5
    assert next_coefficient(0.5, 9.0, 1000, 0.1, 10000) == pytest.approx(0.5 * 1.02)
    assert next_coefficient(0.5, 0.0, 1000, 0.1, 10000) == pytest.approx(0.5 * 0.98)


@pytest.mark.parametrize(
    ("mean_kl", "samples", "target", "horizon", "said"),
    [
        (0.1, 8, 0.0, 100, "positive"),
        (0.1, 8, 0.1, 0, "positive"),
        (float("nan"), 8, 0.1, 100, "mean KL is nan"),
        (float("inf"), 8, 0.1, 100, "mean KL is inf"),
        (0.1, 500, 0.1, 100, "too short for 500 samples"),
    ],
)
def test_a_controller_that_could_not_work_is_refused(
    mean_kl: float, samples: int, target: float, horizon: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        next_coefficient(0.1, mean_kl, samples, target, horizon)
