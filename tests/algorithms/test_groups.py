"""Group estimators: the rules at the edges, by numbers one can check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from corral.algorithms.advantages import ESTIMATORS, TRAITS, AdvantageInput

GROUPED = sorted(name for name, traits in TRAITS.items() if traits.needs_groups)
OF_SCORES = [name for name in GROUPED if "optimal" not in name]


def scored(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInput:
    """Responses of one token, or of the given lengths with the score on the last one."""
    sizes = torch.tensor(lengths or [1] * len(scores))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    rewards = torch.zeros(int(offsets[-1]), dtype=torch.float64)
    rewards[offsets[1:] - 1] = torch.tensor(scores, dtype=torch.float64)
    return AdvantageInput(
        rewards=rewards,
        values=None,
        mask=torch.ones(rewards.numel(), dtype=torch.bool),
        offsets=offsets,
        group=torch.tensor(groups),
        gamma=1.0,
        lam=1.0,
        old_log_probs=torch.full_like(rewards, -1.0),
        sum_pi_squared=torch.full_like(rewards, 0.25),
        components=torch.tensor(scores, dtype=torch.float64)[:, None],
    )


def advantages(name: str, batch: AdvantageInput) -> list[float]:
    return ESTIMATORS[name](batch)[0].tolist()


@pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7, 123456.789])
@pytest.mark.parametrize("name", OF_SCORES)
def test_equal_scores_give_exact_zeros(name: str, score: float) -> None:
    """NeMo-RL issue 1518: advantages of 1e6 where a standard deviation was only rounding."""
    assert advantages(name, scored([score] * 7, [1, 1, 1, 2, 2, 2, 2])) == [0.0] * 7


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline"])
def test_nearly_equal_scores_stay_bounded(name: str) -> None:
    """NeMo-RL pull/4158: E[x²] − E[x]² of nearly equal scores cancels; deviations from the mean do not."""
    scores = [1000.0 + 1e-9, 1000.0, 1000.0, 1000.0]
    assert max(map(abs, advantages(name, scored(scores, [0] * 4)))) < 4
    assert max(map(abs, advantages(name, scored([1.0, 0.0, 0.0, 0.0], [0] * 4)))) < 4


def test_small_differences_of_large_scores_keep_their_digits() -> None:
    offset = 2.0**40
    for name in ("grpo", "rloo", "opo"):
        far, near = (
            advantages(name, scored([base + s for s in (0.25, 0.5, 1.0)], [0] * 3, [1, 1, 1])) for base in (offset, 0.0)
        )
        assert far == pytest.approx(near, rel=1e-12), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 3.0),
        ("grpo_passk", 0.0),
        ("rloo", 0.0),
        ("rloo_vectorized", 0.0),
        ("opo", 0.0),
        ("gpg", 0.0),
        ("optimal_token_baseline", 3.0),
        ("tir_optimal_token_baseline", 3.0),
    ],
)
def test_the_only_sample_left_of_its_group(name: str, expected: float) -> None:
    batch = scored([3.0, 8.0], [0, 0])
    survivor = replace(batch, mask=torch.tensor([True, False]))
    assert advantages(name, survivor) == [expected, 0.0]


def test_a_lone_sample_keeps_its_score_where_the_batch_is_whitened() -> None:
    for name in ("reinforce_plus_plus_baseline", "gdpo"):
        lone, a, b = advantages(name, scored([5.0, 1.0, 1.0], [0, 1, 1]))
        assert (lone, a, b) == pytest.approx((2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5), rel=1e-6), name


def test_passk_refuses_groups_of_one_sample() -> None:
    with pytest.raises(ValueError, match="grpo_passk needs groups of at least 2 samples; 1 groups have one"):
        ESTIMATORS["grpo_passk"](scored([1.0, 2.0, 3.0], [0, 1, 1]))


def test_only_the_best_of_a_group_is_rewarded_by_passk() -> None:
    batch = replace(scored([1.0, 4.0, 2.0, 7.0, 7.0], [0, 0, 0, 1, 1]), norm_by_std=False)
    assert advantages("grpo_passk", batch) == [0.0, 2.0, 0.0, 0.0, 0.0]


def test_grpo_with_and_without_the_standard_deviation() -> None:
    batch = scored([1.0, 2.0, 3.0], [4, 4, 4])
    assert advantages("grpo", batch) == pytest.approx([-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)])
    assert advantages("grpo", replace(batch, norm_by_std=False)) == [-1.0, 0.0, 1.0]


def test_rloo_compares_with_the_others() -> None:
    assert advantages("rloo", scored([1.0, 2.0, 6.0], [0] * 3)) == [-3.0, -1.5, 4.5]


def test_opo_weighs_scores_by_valid_tokens() -> None:
    batch = scored([1.0, 5.0], [0, 0], lengths=[3, 1])
    assert advantages("opo", batch) == [-1.0, -1.0, -1.0, 3.0]
    fewer = replace(batch, mask=torch.tensor([True, False, False, True]))
    assert advantages("opo", fewer) == [-2.0, 0.0, 0.0, 2.0]


def test_gpg_is_larger_where_few_samples_scored() -> None:
    assert advantages("gpg", scored([0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])) == [0.0, 0.0, 2.0, -2.0]


def test_gdpo_without_weights_counts_every_key_once() -> None:
    batch = replace(
        scored([0.0] * 4, [0] * 4), components=torch.tensor([[0.0, 3.0], [1.0, 0.0], [5.0, 1.0], [2.0, 2.0]])
    )
    ones = replace(batch, component_weights=torch.ones(2))
    assert advantages("gdpo", batch) == advantages("gdpo", ones)
    first = replace(batch, component_weights=torch.tensor([1.0, 0.0]))
    assert advantages("gdpo", first) != advantages("gdpo", batch)
    with pytest.raises(ValueError):
        ESTIMATORS["gdpo"](replace(batch, component_weights=torch.ones(3)))


def test_outcome_advantages_are_the_same_at_every_valid_token() -> None:
    batch = scored([1.0, 3.0], [0, 0], lengths=[3, 2])
    for name in ("grpo", "rloo", "opo", "gpg"):
        got, returns = ESTIMATORS[name](replace(batch, mask=torch.tensor([True, False, True, True, True])))
        assert got[0] == got[2] != 0
        assert got[1] == 0
        assert got[3] == got[4]
        assert torch.equal(got, returns)
