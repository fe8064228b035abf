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


def standardised(x: Tensor, epsilon: float = 1e-8) -> Tensor:
    """[n] float64: (x − mean) / √(variance + epsilon) over all n entries, variance unbiased; 0 for a single entry.

    Works in float64: otherwise the rounding of the mean of equal float32 values, divided by √epsilon, would look like
    a signal.
    """
    wide = x.double()
    centred = wide - wide.sum() / max(wide.numel(), 1)
    variance = centred.dot(centred) / max(wide.numel() - 1, 1)
    scale = torch.rsqrt(variance + epsilon)
    return centred * scale if centred.requires_grad else centred.mul_(scale)  # in place: one pass over memory less


def whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """[n]: `standardised` over the valid tokens, in x's dtype; exact zero outside the mask.

    With one valid token the result is zero (mean-centred), with none it is all zeros.
    """
    at = mask.nonzero().squeeze(1)
    return torch.zeros_like(x).index_copy(0, at, standardised(x.index_select(0, at), epsilon).to(x.dtype))
