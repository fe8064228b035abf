from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.advantages import ESTIMATORS, AdvantageInput
from corral.algorithms.segments import discounted_suffix_sums, mean_of_sample_means
from tests.algorithms.ragged import flat, flat_mask, masks, offsets_of, poisoned, rows_like
from tests.oracles import ppo

factors = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))


def batch_of(
    rewards: list[list[float]], values: list[list[float]], mask: list[list[bool]], gamma: float, lam: float
) -> AdvantageInput:
    return AdvantageInput(
        rewards=flat(rewards),
        values=flat(values),
        mask=flat_mask(mask),
        offsets=offsets_of(mask),
        group=torch.zeros(len(mask), dtype=torch.int64),
        gamma=gamma,
        lam=lam,
    )


def check_gae(
    rewards: list[list[float]], values: list[list[float]], mask: list[list[bool]], gamma: float, lam: float
) -> None:
    advantages, returns = ESTIMATORS["gae"](batch_of(rewards, values, mask, gamma, lam))
    raw, expected_returns = ppo.gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(returns, flat(expected_returns), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(advantages, flat(ppo.whiten(raw, mask)), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(st.data(), factors, factors)
def test_gae_matches_the_oracle(data: st.DataObject, gamma: float, lam: float) -> None:
    mask = data.draw(masks())
    check_gae(rows_like(data.draw, mask), rows_like(data.draw, mask), mask, gamma, lam)


@pytest.mark.parametrize("length", [63, 64, 65, 128, 700, 4200])
def test_gae_of_long_responses_matches_the_oracle(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    lengths = [length, 1, 0, 64, length // 2]
    mask = [(torch.rand(n, generator=generator) > 0.2).tolist() for n in lengths]
    rewards, values = ([torch.randn(n, generator=generator).tolist() for n in lengths] for _ in range(2))
    check_gae(rewards, values, mask, 0.999, 0.97)


@pytest.mark.parametrize("outside", [float("nan"), float("inf")])
def test_values_of_tool_tokens_and_everything_of_padding_samples_are_never_read(outside: float) -> None:
    mask = [[True, False, True], [False]]
    batch = batch_of([[0.0, 0.0, 1.0], [outside]], [[0.5, 0.1, 0.2], [0.0]], mask, 0.9, 0.8)
    clean = replace(batch, rewards=poisoned(batch.rewards, batch.mask, 0.0))
    dirty = replace(clean, values=poisoned(batch.values, batch.mask, outside))
    dirty = replace(dirty, rewards=torch.cat([clean.rewards[:3], batch.rewards[3:]]))
    for got, expected in zip(ESTIMATORS["gae"](dirty), ESTIMATORS["gae"](clean), strict=True):
        assert torch.equal(got, expected)


def test_a_reward_on_a_tool_token_belongs_to_the_last_token_of_the_policy_before_it() -> None:
    values = [[0.3, 0.0, 0.0, 0.1]]
    mask = [[True, False, False, True]]
    on_tool = ESTIMATORS["gae"](batch_of([[0.0, 0.5, 2.0, 1.0]], values, mask, 0.9, 0.8))
    moved = ESTIMATORS["gae"](batch_of([[2.5, 0.0, 0.0, 1.0]], values, mask, 0.9, 0.8))
    for got, expected in zip(on_tool, moved, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    # The score lies on the response's last token: lost if that one were a tool token and the credit did not move.
    _, returns = ESTIMATORS["gae"](batch_of([[0.0, 1.0]], [[0.0, 0.0]], [[True, False]], 1.0, 1.0))
    assert returns.tolist() == [1.0, 0.0]
    # Neither the sample before nor a token after it is credited with a reward that came before any action.
    _, returns = ESTIMATORS["gae"](
        batch_of([[1.0], [7.0, 2.0]], [[0.0], [0.0, 0.0]], [[True], [False, True]], 1.0, 1.0)
    )
    assert returns.tolist() == [1.0, 0.0, 2.0]


def test_tool_tokens_do_not_change_the_advantages_of_the_policys_tokens() -> None:
    plain = ESTIMATORS["gae"](batch_of([[0.1, 0.2, 1.0]], [[0.5, 0.4, 0.3]], [[True] * 3], 0.9, 0.8))
    with_tools = batch_of(
        [[0.1, 0.0, 0.0, 0.2, 1.0]], [[0.5, 9.0, 9.0, 0.4, 0.3]], [[True, False, False, True, True]], 0.9, 0.8
    )
    for got, expected in zip(ESTIMATORS["gae"](with_tools), plain, strict=True):
        torch.testing.assert_close(got[with_tools.mask], expected, rtol=0, atol=1e-12)
        assert (got[~with_tools.mask] == 0).all()


def test_equal_rewards_and_constant_values_give_zero_advantages() -> None:
    mask = [[True]] * 4
    advantages, returns = ESTIMATORS["gae"](batch_of([[0.7]] * 4, [[0.2]] * 4, mask, 1.0, 0.95))
    assert advantages.abs().max() < 1e-9
    torch.testing.assert_close(returns, torch.full((4,), 0.7, dtype=torch.float64))


def test_the_dtype_of_the_rewards_is_kept_and_values_are_required() -> None:
    batch = batch_of([[1.0, 2.0]], [[0.0, 0.0]], [[True, True]], 1.0, 1.0)
    narrow = replace(batch, rewards=batch.rewards.float())
    assert [x.dtype for x in ESTIMATORS["gae"](narrow)] == [torch.float32, torch.float32]
    with pytest.raises(ValueError, match="needs the critic's values"):
        ESTIMATORS["gae"](replace(batch, values=None))


@settings(deadline=None)
@given(st.data(), factors)
def test_discounted_suffix_sums_match_the_recurrence(data: st.DataObject, decay: float) -> None:
    mask = data.draw(masks(max_length=150))
    rows = [[float((7 * t + 3 * i) % 11) for t in range(len(row))] for i, row in enumerate(mask)]
    expected = []
    for row in rows:
        carried, reverse = 0.0, []
        for x in reversed(row):
            carried = x + decay * carried
            reverse.append(carried)
        expected.append(reverse[::-1])
    got = discounted_suffix_sums(flat(rows), offsets_of(rows), decay)
    torch.testing.assert_close(got, flat(expected), rtol=1e-11, atol=1e-11)


def test_mean_of_sample_means_skips_samples_without_valid_tokens() -> None:
    x = torch.tensor([1.0, 3.0, float("nan"), 5.0])
    mask = torch.tensor([True, True, False, True])
    assert mean_of_sample_means(x, mask, torch.tensor([0, 2, 3, 3, 4])).item() == pytest.approx(3.5)
    assert mean_of_sample_means(x, torch.zeros(4, dtype=torch.bool), torch.tensor([0, 2, 3, 3, 4])).item() == 0


@pytest.mark.parametrize("first", [0, 1, 30, 31, 32])
def test_samples_that_meet_at_and_across_blocks_match_the_recurrence(first: int) -> None:
    """Every length around a block, at every place in a block, and pairs that straddle its border."""
    lengths = [first, 2, 62, 2, 0, 62, 2, *range(30, 36), 1, 1, *range(62, 67), 31 * 32 + 2, 1025, 2]
    rows = [[float((5 * t + 3 * i) % 7 - 3) for t in range(length)] for i, length in enumerate(lengths)]
    mask = [[True] * length for length in lengths]
    zeros = [[0.0] * length for length in lengths]
    check_gae(rows, zeros, mask, 0.75, 1.0)
    check_gae(rows, rows, mask, 1.0, 0.5)
