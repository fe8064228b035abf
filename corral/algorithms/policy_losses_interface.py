"""What a policy loss is: one loss per token and what happened to the token. Nothing is aggregated in a loss.

A loss sees any slice of a mini-batch's tokens, so whatever depends on a whole sample or on the whole mini-batch comes
to it as a number per token: the loss declares `statistics`, which is called once per optimizer step with the whole
mini-batch of all ranks, at the weights that step starts from.

Legend: n tokens of a slice, R tokens and S samples of the whole mini-batch, sg stop-gradient,
d = log π − log π_old, r = e^d with d clamped to ±20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from corral.algorithms.masked import select
from corral.algorithms.rollout_correction import Settings

if TYPE_CHECKING:
    from corral.config.plan import PolicyLossOptions

_MAX_LOG_RATIO = 20.0  # e^20 ≈ 5e8: finite in float32 and bfloat16, and far beyond any clip


@dataclass(frozen=True)
class PolicyLossInput:
    """A slice of n tokens and the settings.

    log_probs [n] (differentiable), old_log_probs [n], advantages [n], mask [n] bool. Ratios are clipped to
    [1 − clip_low, 1 + clip_high]; clip_c > 1 is the dual clip. options: settings of single losses. The rest are the
    loss's own `statistics` [n], None when it has none.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    clip_low: float
    clip_high: float
    clip_c: float
    options: PolicyLossOptions
    sequence_log_ratio: Tensor | None = None
    sequence_advantage: Tensor | None = None
    selected: Tensor | None = None


@dataclass(frozen=True)
class StatisticsInput:
    """The whole mini-batch at the weights its optimizer step starts from.

    log_probs, old_log_probs, advantages [R] without gradient, mask [R] bool, offsets [S+1]; settings as above.
    draw [R] int64: each token's uniform random number, which depends on the token and the step, not on where the token
    lies in the mini-batch. correction: the settings of rollout correction, None without it.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    clip_low: float
    clip_high: float
    clip_c: float
    options: PolicyLossOptions
    draw: Tensor
    correction: Settings | None = None


Loss = Callable[[PolicyLossInput], tuple[Tensor, Mapping[str, Tensor]]]
"""Gives the loss [n] and, by name of metric, statistics [n]. The loss is zero outside the mask. An objective weighs the
losses and reports each statistic's mean over the mini-batch's valid tokens. The names are the same in every call."""

Statistics = Callable[[StatisticsInput], Mapping[str, Tensor]]
"""Gives values [R] by field of the batch: sequence_log_ratio, sequence_advantage, selected, rollout_is_weights."""


@dataclass(frozen=True)
class PolicyLoss:
    """loss: per token. statistics: what it needs to know about the whole mini-batch, None for nothing. aggregation:
    the only `loss_agg_mode` its formula is meant for, used whatever is configured; None: any."""

    loss: Loss
    statistics: Statistics | None = None
    aggregation: str | None = None


class _Tokens(Protocol):
    @property
    def log_probs(self) -> Tensor: ...
    @property
    def old_log_probs(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...


def log_ratio_of(tokens: _Tokens) -> Tensor:
    """d [n], exact zero outside the mask."""
    return select(tokens.log_probs, tokens.mask) - select(tokens.old_log_probs, tokens.mask)


def advantages_of(tokens: _Tokens) -> Tensor:
    """A [n], exact zero outside the mask."""
    return select(tokens.advantages, tokens.mask)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """e^x of x [n] clamped to ±20: finite whatever the policy did."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(max(−A·ratio, −A·clip(ratio, 1 − low, 1 + high)) [n], where the second is larger [n] bool).

    Source: Schulman et al., arXiv:1707.06347.
    """
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), clipped > free
