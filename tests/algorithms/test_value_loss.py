from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.value_loss import clipped_value_loss
from tests.algorithms.ragged import OUTSIDE, flat, flat_mask, masks, poisoned, rows_like
from tests.oracles import ppo

CLIP = 0.5


@settings(deadline=None)
@given(st.data(), st.sampled_from(OUTSIDE))
def test_matches_the_oracle_whatever_lies_outside_the_mask(data: st.DataObject, outside: float) -> None:
    mask = data.draw(masks())
    values, old, returns = (rows_like(data.draw, mask) for _ in range(3))
    valid = flat_mask(mask)
    x, y, r = (poisoned(flat(rows), valid, outside) for rows in (values, old, returns))
    x.requires_grad_()
    loss, clipped = clipped_value_loss(x, y, r, valid, CLIP)
    expected = [
        ppo.value_token(v, o, target, CLIP) if keep else (0.0, 0.0)
        for rows in zip(values, old, returns, mask, strict=True)
        for v, o, target, keep in zip(*rows, strict=True)
    ]
    torch.testing.assert_close(loss, flat([[pair[0] for pair in expected]]), rtol=1e-10, atol=1e-10)
    # A tie between the branches may round either way: the flag has to match where they differ.
    decided = (loss - (x - r).square() / 2).abs() > 1e-9
    assert torch.equal(clipped[decided], flat([[pair[1] for pair in expected]])[decided])
    if loss.numel():
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert torch.isfinite(gradient).all()
        assert (gradient[~valid] == 0).all()


@pytest.mark.parametrize("value", [-2.0, -0.3, 0.0, 0.2, 0.9, 4.0])
@pytest.mark.parametrize("target", [-1.0, 0.1, 1.7])
def test_gradient_agrees_with_central_differences(value: float, target: float) -> None:
    x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero, valid = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    loss, _ = clipped_value_loss(x, zero, zero + target, valid, CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    ahead, behind = (ppo.value_token(value + step, 0.0, target, CLIP)[0] for step in (1e-6, -1e-6))
    assert gradient.item() == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-8)
