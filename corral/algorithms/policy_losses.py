"""Policy losses by name: one loss per token and what happened to the token. Nothing is aggregated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms.masked import select

_MAX_LOG_RATIO = 20.0  # e^20 ≈ 5e8: finite in float32 and bfloat16, and far beyond any clip


@dataclass(frozen=True)
class PolicyLossInput:
    """A slice of n tokens and the clip range.

    log_probs [n] (differentiable), old_log_probs [n], advantages [n], mask [n] bool. The ratio is clipped to
    [1 − clip_low, 1 + clip_high]; the loss of a negative advantage is bounded by −advantage · clip_c, clip_c > 1.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    clip_low: float
    clip_high: float
    clip_c: float


PolicyLoss = Callable[[PolicyLossInput], tuple[Tensor, dict[str, Tensor]]]
"""Gives the loss [n] and detached statistics [n] of the same dtype, all zero outside the mask:
clipped (1 where the ratio's clip decides), clipped_lower (1 where the dual clip decides), kl (−log-ratio)."""


def vanilla(tokens: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al., arXiv:1707.06347) with the dual clip (Ye et al., arXiv:1912.09729)."""
    mask = tokens.mask
    advantages = select(tokens.advantages, mask)
    log_ratio = select(tokens.log_probs, mask) - select(tokens.old_log_probs, mask)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - tokens.clip_low, 1 + tokens.clip_high)
    pessimistic = torch.maximum(free, clipped)
    bound = -advantages * tokens.clip_c
    bounded = (advantages < 0) & (pessimistic > bound)

    statistics = {"clipped": clipped > free, "clipped_lower": bounded, "kl": -log_ratio.detach()}
    return torch.where(bounded, bound, pessimistic), {k: v.to(log_ratio.dtype) for k, v in statistics.items()}


POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla}
