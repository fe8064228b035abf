from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.kl import kl, kl_in_reward
from tests.algorithms.ragged import OUTSIDE, flat, flat_mask, masks, poisoned, rows_like
from tests.oracles import ppo

KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
VALID = torch.ones(1, dtype=torch.bool)


def expected_kl(log_probs: list[list[float]], ref: list[list[float]], mask: list[list[bool]], kind: str) -> list[float]:
    return [
        ppo.kl_token(x, y, kind) if keep else 0.0
        for rows in zip(log_probs, ref, mask, strict=True)
        for x, y, keep in zip(*rows, strict=True)
    ]


@settings(deadline=None)
@given(st.data(), st.sampled_from(KINDS), st.sampled_from(["", "+"]), st.sampled_from(OUTSIDE))
def test_matches_the_oracle_whatever_lies_outside_the_mask(
    data: st.DataObject, kind: str, suffix: str, outside: float
) -> None:
    mask = data.draw(masks())
    log_probs, ref = rows_like(data.draw, mask), rows_like(data.draw, mask)
    valid = flat_mask(mask)
    x, y = (poisoned(flat(rows), valid, outside) for rows in (log_probs, ref))
    x.requires_grad_()
    result = kl(x, y, valid, kind + suffix)
    torch.testing.assert_close(result, flat([expected_kl(log_probs, ref, mask, kind)]), rtol=1e-10, atol=1e-10)
    if result.numel():
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.isfinite(gradient).all()
        assert (gradient[~valid] == 0).all()


@pytest.mark.parametrize("difference", [-3.0, -0.2, 0.4, 1.9])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_central_differences(kind: str, difference: float) -> None:
    x = torch.tensor([difference - 1.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([-1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(kl(x, y, VALID, kind).sum(), x)
    ahead, behind = (ppo.kl_token(difference - 1.0 + step, -1.0, kind) for step in (1e-6, -1e-6))
    assert gradient.item() == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-8)
    # Straight-through: the gradient of k2, which is the log-ratio itself.
    (gradient,) = torch.autograd.grad(kl(x, y, VALID, kind + "+").sum(), x)
    assert gradient.item() == pytest.approx(difference)


@pytest.mark.parametrize("difference", [1e4, -1e4, 3e18])
@pytest.mark.parametrize("kind", [k + s for k in KINDS for s in ("", "+")])
def test_huge_log_ratios_have_finite_values_and_gradients_in_float32(kind: str, difference: float) -> None:
    x = torch.tensor([difference], requires_grad=True)
    value = kl(x, torch.zeros(1), VALID, kind)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert math.isfinite(value.item())
    assert math.isfinite(gradient.item())


def test_k3_is_never_negative_and_keeps_the_digits_of_a_small_log_ratio() -> None:
    x = torch.tensor([1e-3, -1e-3, 1e-2, -1e-2, 0.0])
    value = kl(x, torch.zeros(5), torch.ones(5, dtype=torch.bool), "k3")
    assert (value >= 0).all()
    torch.testing.assert_close(value.double(), torch.expm1(-x.double()) + x.double(), rtol=1e-3, atol=0)


def test_an_unknown_kind_is_named() -> None:
    for kind in ("full", "k4", "k3++"):
        with pytest.raises(ValueError, match="unknown KL estimator"):
            kl(torch.zeros(1), torch.zeros(1), VALID, kind)


@settings(deadline=None)
@given(st.data(), st.sampled_from(KINDS))
def test_kl_in_reward_takes_the_penalty_off_valid_tokens_only(data: st.DataObject, kind: str) -> None:
    mask = data.draw(masks())
    scores, old, ref = (rows_like(data.draw, mask) for _ in range(3))
    valid = flat_mask(mask)
    dirty = [poisoned(flat(rows), valid, float("nan")) for rows in (old, ref)]
    rewards, penalty = kl_in_reward(flat(scores), *dirty, valid, 0.05, kind)
    expected = flat([expected_kl(old, ref, mask, kind)])
    torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rewards, flat(scores) - 0.05 * expected, rtol=1e-10, atol=1e-10)
