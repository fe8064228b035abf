"""Baselines that are not a critic's: numbers one can check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from corral.algorithms.advantage_input import ValidTokens
from corral.algorithms.advantages import ESTIMATORS, AdvantageInput
from tests.algorithms.ragged import flat, flat_mask, offsets_of


def batch_of(rewards: list[list[float]], mask: list[list[bool]], groups: list[int]) -> AdvantageInput:
    tokens = sum(map(len, mask))
    return AdvantageInput(
        rewards=flat(rewards),
        values=None,
        mask=flat_mask(mask),
        offsets=offsets_of(mask),
        group=torch.tensor(groups),
        gamma=0.5,  # not read
        lam=0.5,
        old_log_probs=torch.full((tokens,), 0.5, dtype=torch.float64).log(),
        sum_pi_squared=torch.full((tokens,), 0.5, dtype=torch.float64),
        baseline=torch.tensor([2.0] * len(mask), dtype=torch.float64),
    )


def test_remax_subtracts_the_greedy_score_from_the_undiscounted_reward_to_go() -> None:
    batch = batch_of([[1.0, 0.0, 4.0], [3.0]], [[True, False, True], [True]], [0, 0])
    advantages, returns = ESTIMATORS["remax"](replace(batch, baseline=torch.tensor([2.0, 5.0])))
    assert returns.tolist() == [5.0, 0.0, 4.0, 3.0]
    assert advantages.tolist() == [3.0, 0.0, 2.0, -2.0]


def test_beyond_the_second_longest_response_there_is_no_baseline() -> None:
    batch = batch_of([[0.0, 0.0, 6.0], [2.0], [0.0, 1.0]], [[True] * 3, [True], [True] * 2], [0, 0, 0])
    advantages, returns = ESTIMATORS["optimal_token_baseline"](batch)
    # Every token has weight 1 − 2·½ + ½ = ½, so the first has W = ½ and the second W = 1 in all samples.
    assert returns.tolist() == [6.0, 6.0, 6.0, 2.0, 1.0, 1.0]
    assert advantages.tolist() == pytest.approx([3.0, 2.5, 6.0, -1.0, -2.0, -2.5], abs=1e-6)


def test_uncertain_tokens_and_large_weights_pull_the_baseline() -> None:
    batch = batch_of([[4.0], [0.0]], [[True], [True]], [0, 0])
    even = ESTIMATORS["optimal_token_baseline"](batch)[0]
    assert even.tolist() == pytest.approx([2.0, -2.0], abs=1e-6)
    certain = replace(batch, old_log_probs=torch.tensor([0.0, batch.old_log_probs[1]]))
    certain = replace(certain, sum_pi_squared=torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert ESTIMATORS["optimal_token_baseline"](certain)[0].tolist() == pytest.approx([4.0, 0.0], abs=1e-6)
    weighted = replace(batch, rollout_is_weights=torch.tensor([2.0, 1.0]))  # squared: 4 to 1
    assert ESTIMATORS["optimal_token_baseline"](weighted)[0].tolist() == pytest.approx([0.8, -3.2], abs=1e-6)


def test_the_tir_form_compares_the_nth_token_of_the_policy_whatever_tools_said_between() -> None:
    mask = [[True, False, False, True], [True, True]]
    batch = batch_of([[0.0, 0.0, 0.0, 4.0], [0.0, 2.0]], mask, [0, 0])
    tir = ESTIMATORS["tir_optimal_token_baseline"](batch)[0]
    assert tir.tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0, -1.0, -1.0], abs=1e-6)
    plain = ESTIMATORS["optimal_token_baseline"](batch)[0]
    # Token 3 of the first and token 1 of the second response have no counterpart: no baseline.
    assert plain.tolist() == pytest.approx([1.0, 0.0, 0.0, 4.0, -1.0, 2.0], abs=1e-6)


def test_rounding_cannot_make_a_weight_negative() -> None:
    batch = batch_of([[4.0], [0.0]], [[True], [True]], [0, 0])
    batch = replace(batch, old_log_probs=torch.zeros(2), sum_pi_squared=torch.tensor([1.0 - 1e-7, 1.0]).double())
    advantages, _ = ESTIMATORS["optimal_token_baseline"](batch)
    assert advantages.tolist() == [4.0, 0.0]


def test_old_log_probs_are_needed() -> None:
    batch = batch_of([[4.0], [0.0]], [[True], [True]], [0, 0])
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        with pytest.raises(ValueError, match=f"^{name} needs old log-probs"):
            ESTIMATORS[name](replace(batch, old_log_probs=None))


def test_rewards_are_credited_to_the_last_action_before_them() -> None:
    mask = [[False, True, False, False, True, False], [False], [True]]
    batch = batch_of([[7.0, 1.0, 2.0, 3.0, 4.0, 5.0], [9.0], [6.0]], mask, [0, 0, 0])
    tokens = ValidTokens.of(batch)
    assert tokens.positions.tolist() == [1, 4, 7]
    assert tokens.offsets.tolist() == [0, 2, 2, 3]
    assert tokens.rewards.tolist() == [6.0, 9.0, 6.0]
