from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.masked import masked_mean, masked_sum, masked_var, whiten
from tests.algorithms.ragged import OUTSIDE, flat, flat_mask, masks, poisoned, rows_like
from tests.oracles import ppo


@settings(deadline=None)
@given(st.data(), st.sampled_from(OUTSIDE))
def test_whiten_matches_the_oracle_whatever_lies_outside_the_mask(data: st.DataObject, outside: float) -> None:
    mask = data.draw(masks())
    rows = rows_like(data.draw, mask)
    x = poisoned(flat(rows), flat_mask(mask), outside).requires_grad_()
    result = whiten(x, flat_mask(mask))
    torch.testing.assert_close(result, flat(ppo.whiten(rows, mask)), rtol=1e-10, atol=1e-10)
    if x.numel():
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert torch.isfinite(gradient).all()
        assert (gradient[~flat_mask(mask)] == 0).all()


@pytest.mark.parametrize("outside", OUTSIDE)
def test_values_and_gradients_outside_the_mask_never_leak(outside: float) -> None:
    mask = torch.tensor([True, False, True, True])
    for reduce in (masked_sum, masked_mean, masked_var):
        x = torch.tensor([1.0, outside, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
        value = reduce(x, mask)
        assert value.item() == pytest.approx({masked_sum: 9.0, masked_mean: 3.0, masked_var: 7.0}[reduce])
        (gradient,) = torch.autograd.grad(value, x)
        assert torch.isfinite(gradient).all()
        assert gradient[1] == 0


def test_no_valid_token_and_one_valid_token_are_defined() -> None:
    x = torch.tensor([3.0, float("nan")], dtype=torch.float64)
    none, one = torch.tensor([False, False]), torch.tensor([True, False])
    assert [f(x, none).item() for f in (masked_sum, masked_mean, masked_var)] == [0, 0, 0]
    assert [f(x, one).item() for f in (masked_sum, masked_mean, masked_var)] == [3, 3, 0]
    assert whiten(x, none).tolist() == [0, 0]
    assert whiten(x, one).tolist() == [0, 0]


def test_equal_values_whiten_to_zero_also_in_float32() -> None:
    x = torch.full((1001,), 0.1)
    assert whiten(x, torch.ones(1001, dtype=torch.bool)).abs().max() < 1e-6
