"""Advantage estimators by name: what each response token was worth, and what the critic should have predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms.masked import whiten
from corral.algorithms.segments import discounted_suffix_sums, valid_offsets


@dataclass(frozen=True)
class AdvantageInput:
    """The whole batch of one step, before any split.

    rewards [R]: per token; those at masked positions count too (see the estimator), so they must be finite.
    values [R]: critic's prediction before each token, None for estimators without a critic. mask [R] bool: tokens of
    the policy, all False on padding samples. offsets [S+1]. group [S]: equal for samples of one prompt. gamma, lam:
    discount and GAE's λ.
    """

    rewards: Tensor
    values: Tensor | None
    mask: Tensor
    offsets: Tensor
    group: Tensor
    gamma: float
    lam: float


Estimator = Callable[[AdvantageInput], tuple[Tensor, Tensor]]
"""Gives (advantages [R], returns [R]) in the dtype of the rewards, both exact zero outside the mask."""


def gae(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438) over the policy's own tokens.

    Masked tokens (tool output, observations) are not actions: they are taken out of the row, so neither γ nor λ
    counts them. A reward on a masked token is earned by what the policy did before it and is credited to the last
    preceding valid token of the sample; a reward before the first valid token has no action to credit and is left
    out. The value after a sample's last token is 0, also when it was cut off by length. returns = advantages + values
    before whitening; advantages are then whitened over all valid tokens of the batch. Computed in float64.

    Raises ValueError without values.
    """
    if batch.values is None:
        raise ValueError("gae needs the critic's values")
    mask, offsets = batch.mask, valid_offsets(batch.mask, batch.offsets)
    rewards, values = _credited_rewards(batch, offsets), batch.values[mask].double()

    next_values = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    next_values[offsets[1:][offsets.diff() > 0] - 1] = 0
    deltas = rewards + batch.gamma * next_values - values
    advantages = discounted_suffix_sums(deltas, offsets, batch.gamma * batch.lam)

    everything = torch.ones_like(advantages, dtype=torch.bool)
    return _spread(whiten(advantages, everything), batch), _spread(advantages + values, batch)


def _credited_rewards(batch: AdvantageInput, offsets: Tensor) -> Tensor:
    """[valid tokens] float64: rewards, those of masked tokens added to the last valid token before them."""
    owner = batch.mask.cumsum(0) - 1
    has_owner = owner >= torch.repeat_interleave(offsets[:-1], batch.offsets.diff())
    total = torch.zeros(int(offsets[-1]), dtype=torch.float64, device=batch.rewards.device)
    return total.index_add_(0, owner[has_owner], batch.rewards[has_owner].double())


def _spread(valid: Tensor, batch: AdvantageInput) -> Tensor:
    """[valid tokens] back to [R], zero elsewhere, in the dtype of the rewards."""
    out = torch.zeros_like(batch.rewards)
    out[batch.mask] = valid.to(out.dtype)
    return out


ESTIMATORS: dict[str, Estimator] = {"gae": gae}
