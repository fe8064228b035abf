"""The critic's loss per token."""

from __future__ import annotations

import torch
from torch import Tensor

from corral.algorithms.masked import select


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """½ · max((v − R)², (v̂ − R)²) with v̂ = v clipped to old value ± clip; all [n], values differentiable, mask bool.

    Gives (loss [n], clipped [n]: 1 where the clipped branch is the larger), both zero outside the mask.
    Source: the reference implementation of PPO; see Engstrom et al., 2020, arXiv:2005.12729.
    """
    values, old_values, returns = (select(x, mask) for x in (values, old_values, returns))
    near = values.clamp(old_values - clip, old_values + clip)
    free_error, near_error = (values - returns).square(), (near - returns).square()
    return torch.maximum(free_error, near_error) / 2, (near_error > free_error).to(values.dtype)
