"""Sums, means, variances and whitening over the valid tokens of a vector, defined for any number of them."""

from __future__ import annotations

import torch
from torch import Tensor


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x [n] where mask [n] bool, else exact zero, in value and in gradient, whatever x holds there (NaN, inf)."""
    return torch.where(mask, x, 0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: Σ x over the valid tokens; 0 when there are none."""
    return select(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: Σ x over the valid tokens / their number, exactly (no epsilon); 0 when there are none."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar: unbiased variance, Σ (x − mean)² / (valid tokens − 1); 0 for none or one, where it is undefined."""
    deviation = select(x - masked_mean(x, mask), mask)
    return (deviation * deviation).sum() / (mask.sum() - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """[n]: (x − mean) / √(variance + epsilon) over the valid tokens, exact zero outside the mask.

    Works in float64 and returns x's dtype: otherwise the rounding of the mean of equal float32 values, divided by
    √epsilon, would look like a signal. With one valid token the result is zero (mean-centred), with none it is all
    zeros.
    """
    wide = select(x, mask).double()
    centred = select(wide - masked_mean(wide, mask), mask)
    return (centred * torch.rsqrt(masked_var(wide, mask) + epsilon)).to(x.dtype)
