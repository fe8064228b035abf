from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInput
from tests.algorithms.ragged import OUTSIDE, flat, flat_mask, masks, poisoned, rows_like
from tests.oracles import ppo

LOW, HIGH, C = 0.2, 0.28, 3.0
# Near 1, at the clip's edges, beyond the dual clip, and far beyond what exp can hold.
log_ratios = st.one_of(st.floats(-0.4, 0.4), st.floats(-3, 3), st.sampled_from([0.0, 1e4, -1e4]))


def slice_of(
    log_probs: list[list[float]], old: list[list[float]], advantages: list[list[float]], mask: list[list[bool]]
) -> PolicyLossInput:
    return PolicyLossInput(flat(log_probs), flat(old), flat(advantages), flat_mask(mask), LOW, HIGH, C)


@settings(deadline=None)
@given(st.data(), st.sampled_from(OUTSIDE))
def test_vanilla_matches_the_oracle_whatever_lies_outside_the_mask(data: st.DataObject, outside: float) -> None:
    mask = data.draw(masks())
    old, advantages = rows_like(data.draw, mask), rows_like(data.draw, mask)
    log_probs = [[x + data.draw(log_ratios) for x in row] for row in old]
    tokens = slice_of(log_probs, old, advantages, mask)
    valid = tokens.mask
    dirty = replace(
        tokens,
        log_probs=poisoned(tokens.log_probs, valid, outside).requires_grad_(),
        old_log_probs=poisoned(tokens.old_log_probs, valid, outside),
        advantages=poisoned(tokens.advantages, valid, outside),
    )
    loss, happened = POLICY_LOSSES["vanilla"](dirty)
    for name, got, place in (
        ("loss", loss, 0),
        ("clipped", happened["clipped"], 1),
        ("clipped_lower", happened["clipped_lower"], 2),
        ("kl", happened["kl"], 3),
    ):
        expected = [
            ppo.policy_token(x, y, a, LOW, HIGH, C)[place] if keep else 0.0
            for rows in zip(log_probs, old, advantages, mask, strict=True)
            for x, y, a, keep in zip(*rows, strict=True)
        ]
        torch.testing.assert_close(got, flat([expected]), rtol=1e-10, atol=1e-10, msg=f"{name}: {got} {expected}")
    if loss.numel():
        (gradient,) = torch.autograd.grad(loss.sum(), dirty.log_probs)
        assert torch.isfinite(gradient).all()
        assert (gradient[~valid] == 0).all()


@pytest.mark.parametrize("advantage", [1.3, -0.7, 0.0])
@pytest.mark.parametrize("log_ratio", [0.0, 0.1, -0.1, 0.5, -0.5, 2.0, -2.0, 30.0, -30.0])
def test_gradient_agrees_with_central_differences(log_ratio: float, advantage: float) -> None:
    def loss_at(x: float) -> float:
        return ppo.policy_token(x, -1.0, advantage, LOW, HIGH, C)[0]

    x = -1.0 + log_ratio
    tokens = slice_of([[x]], [[-1.0]], [[advantage]], [[True]])
    tokens.log_probs.requires_grad_()
    loss, _ = POLICY_LOSSES["vanilla"](tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
    step = 1e-6
    assert gradient.item() == pytest.approx((loss_at(x + step) - loss_at(x - step)) / (2 * step), rel=1e-6, abs=1e-8)


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped() -> None:
    log_probs = [[-0.3, -7.0, -1e-4]]
    tokens = slice_of(log_probs, log_probs, [[1.0, -2.0, 0.0]], [[True] * 3])
    tokens.log_probs.requires_grad_()
    loss, happened = POLICY_LOSSES["vanilla"](tokens)
    assert torch.equal(loss, -tokens.advantages)
    assert all((value == 0).all() for value in happened.values())
    # The gradient of the surrogate at ratio 1 is the policy gradient, −A per unit of log-prob.
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
    assert torch.equal(gradient, -tokens.advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 88.0])
def test_huge_log_ratios_stay_finite(dtype: torch.dtype, log_ratio: float) -> None:
    for advantage in (1.0, -1.0):
        x = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
        zero, valid = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=torch.bool)
        tokens = PolicyLossInput(x, zero, zero + advantage, valid, LOW, HIGH, C)
        loss, _ = POLICY_LOSSES["vanilla"](tokens)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert math.isfinite(loss.item())
        assert math.isfinite(gradient.item())
        assert loss.dtype == dtype
