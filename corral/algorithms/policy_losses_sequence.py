"""Policy losses with one ratio a sample. Legend in `policy_losses_interface`.

A ratio that is a mean over a sample's tokens cannot be computed from a slice of them. Its value comes from the
statistics, and each token adds the gradient of its own log-prob: x = s + d − sg(d) has the value s, and gradient 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corral.algorithms.masked import select
from corral.algorithms.policy_losses_interface import (
    PolicyLossInput,
    StatisticsInput,
    advantages_of,
    bounded_exp,
    clipped_surrogate,
    log_ratio_of,
)
from corral.algorithms.segments import sample_of_token, valid_offsets

_MAX_SEQUENCE_LOG_RATIO = 10.0


def gspo(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Group sequence policy optimization, its per-token form (Zheng et al., arXiv:2507.18071).

    r = e^min(log π − sg(log π) + sg(mean d of the sample), 10); L = max(−A·r, −A·clip(r)). With one advantage a
    sample, the gradient is that of its sequence form. pg_clipfrac: the clip decides; ppo_kl: −d.
    """
    log_ratio = log_ratio_of(tokens)
    ratio = _live(tokens, tokens.sequence_log_ratio, log_ratio).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    loss, clipped = clipped_surrogate(ratio, advantages_of(tokens), tokens.clip_low, tokens.clip_high)
    return loss, {"pg_clipfrac": clipped, "ppo_kl": -log_ratio.detach()}


def mean_log_ratio(batch: StatisticsInput) -> dict[str, Tensor]:
    """For `gspo`: sequence_log_ratio, the mean of d over the sample's valid tokens."""
    return {"sequence_log_ratio": _sample_means(log_ratio_of(batch), batch)}


def geo_mean(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Geometric-mean policy optimization (Zhao et al., arXiv:2507.20673): L = −mean(A) · e^mean(e), per sample.

    e: d, at most ε_high where A > 0, at least −ε_low where A < 0, 0 where A = 0 (the bounds are of the log-ratio).
    The mean of e is clamped to ±20. Every token of a sample has the sample's loss, so their mean is that loss and its
    gradient. pg_clipfrac: the bound decides where A > 0, pg_clipfrac_lower: where A < 0; ppo_kl: −d.
    """
    advantages, log_ratio = advantages_of(tokens), log_ratio_of(tokens)
    bounded = _bounded_log_ratio(tokens)
    ratio = bounded_exp(_live(tokens, tokens.sequence_log_ratio, bounded))
    assert tokens.sequence_advantage is not None
    return -select(tokens.sequence_advantage, tokens.mask) * ratio, {
        "pg_clipfrac": (advantages > 0) & (bounded != log_ratio),
        "pg_clipfrac_lower": (advantages < 0) & (bounded != log_ratio),
        "ppo_kl": -log_ratio.detach(),
    }


def mean_bounded_log_ratio(batch: StatisticsInput) -> dict[str, Tensor]:
    """For `geo_mean`: sequence_log_ratio and sequence_advantage, the means of e and A over the sample's tokens."""
    return {
        "sequence_log_ratio": _sample_means(_bounded_log_ratio(batch), batch),
        "sequence_advantage": _sample_means(advantages_of(batch), batch),
    }


def _bounded_log_ratio(tokens: PolicyLossInput | StatisticsInput) -> Tensor:
    advantages, log_ratio = advantages_of(tokens), log_ratio_of(tokens)
    negative = torch.where(advantages < 0, log_ratio.clamp(min=-tokens.clip_low), 0)
    return torch.where(advantages > 0, log_ratio.clamp(max=tokens.clip_high), negative)


def _live(tokens: PolicyLossInput, value: Tensor | None, through: Tensor) -> Tensor:
    """[n] with the value of a statistic and the gradient of `through`."""
    assert value is not None
    return select(value, tokens.mask) + (through - through.detach())


def _sample_means(x: Tensor, batch: StatisticsInput) -> Tensor:
    """[R]: for each token the mean of x [R], zero outside the mask, over its sample's valid tokens."""
    at = sample_of_token(batch.offsets)
    counts = valid_offsets(batch.mask, batch.offsets).diff()
    sums = torch.zeros(counts.numel(), dtype=torch.float64, device=x.device).index_add_(0, at, x.double())
    return (sums / counts.clamp(min=1))[at].to(x.dtype)
