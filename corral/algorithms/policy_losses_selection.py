"""Policy losses that treat a few tokens of the whole mini-batch differently. Legend in `policy_losses_interface`.

Which tokens depends on the covariance of advantage and log-prob, (A − mean A) · (log π − mean log π), and for one of
them on chance. All of it is decided for the whole mini-batch, and a token's random number is keyed by the token: so
neither a split nor the order of samples changes the choice.

Source: Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corral.algorithms.masked import masked_mean, select
from corral.algorithms.policy_losses_interface import (
    PolicyLossInput,
    StatisticsInput,
    advantages_of,
    bounded_exp,
    clipped_surrogate,
    log_ratio_of,
)
from corral.algorithms.segments import sample_of_token
from corral.batch import Batch

# Covariances closer than this share of the largest possible one are equal: far above rounding, so that equal ones are
# ordered by their random numbers in every split, and far below anything that matters.
_GRID = 2.0**-32


def clip_cov(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """L = max(−A·r, −A·clip(r)), 0 on the selected tokens.

    pg_clipfrac: the clip decides and the token is not selected; pg_selected: selected; ppo_kl: −d.
    """
    log_ratio, selected = log_ratio_of(tokens), _selected(tokens)
    loss, clipped = clipped_surrogate(bounded_exp(log_ratio), advantages_of(tokens), tokens.clip_low, tokens.clip_high)
    return select(loss, ~selected), {
        "pg_clipfrac": clipped & ~selected,
        "pg_selected": selected,
        "ppo_kl": -log_ratio.detach(),
    }


def within_band(batch: StatisticsInput) -> dict[str, Tensor]:
    """For `clip_cov`: a random choice among the tokens that no clip decides about and whose covariance lies inside
    (options.clip_cov_lb, options.clip_cov_ub); as many as options.clip_cov_ratio of all valid tokens, at least one if
    there is any."""
    covariance = _covariances(batch)
    _, clipped = clipped_surrogate(
        bounded_exp(log_ratio_of(batch)), advantages_of(batch), batch.clip_low, batch.clip_high
    )
    inside = (covariance > batch.options.clip_cov_lb) & (covariance < batch.options.clip_cov_ub)
    candidates = (batch.mask & ~clipped & inside).nonzero()[:, 0]
    chosen = candidates[batch.draw[candidates].argsort()[: _count(batch, batch.options.clip_cov_ratio)]]
    return {"selected": _marked(batch, chosen)}


def kl_cov(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """L = −A·r, plus options.ppo_kl_coef · abs(d) on the selected tokens. pg_selected: selected; ppo_kl: −d."""
    log_ratio, selected = log_ratio_of(tokens), _selected(tokens)
    penalty = tokens.options.ppo_kl_coef * select(log_ratio, selected).abs()
    return penalty - advantages_of(tokens) * bounded_exp(log_ratio), {
        "pg_selected": selected,
        "ppo_kl": -log_ratio.detach(),
    }


def largest(batch: StatisticsInput) -> dict[str, Tensor]:
    """For `kl_cov`: the tokens of largest covariance, options.kl_cov_ratio of all valid tokens and at least one. Equal
    ones are taken in the order of their random numbers."""
    candidates = batch.mask.nonzero()[:, 0]
    candidates = candidates[batch.draw[candidates].argsort()]
    order = _on_grid(batch)[candidates].argsort(descending=True, stable=True)
    return {"selected": _marked(batch, candidates[order[: _count(batch, batch.options.kl_cov_ratio)]])}


def token_draws(batch: Batch, *key: int) -> Tensor:
    """[R] int64, uniform in [0, 2^63): one number a response token, from the key, the token's data row, sample index
    and position in the response. Mixing is that of SplitMix64 (Steele et al., OOPSLA 2014)."""
    state = torch.zeros(len(batch), dtype=torch.int64)
    for part in (*map(torch.tensor, key), batch.row, batch.sample_index):
        state = _mix(state ^ part)
    samples = sample_of_token(batch.response_offsets)
    position = torch.arange(samples.numel()) - batch.response_offsets[samples]
    return _mix(state[samples] ^ position) & (2**63 - 1)


def _mix(x: Tensor) -> Tensor:
    """[n] int64, taken as unsigned; products wrap."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right, with zeros coming in: >> of a signed number brings in its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _covariances(batch: StatisticsInput) -> Tensor:
    """[R] float64, zero outside the mask."""
    return select(_centred(batch.advantages, batch.mask) * _centred(batch.log_probs, batch.mask), batch.mask)


def _on_grid(batch: StatisticsInput) -> Tensor:
    """[R]: covariances as multiples of the grid's step."""
    scale = [select(x, batch.mask).double().abs().max() for x in (batch.advantages, batch.log_probs) if x.numel()]
    step = _GRID * torch.stack(scale).prod() if scale else torch.ones(())
    return (_covariances(batch) / torch.where(step > 0, step, 1)).round()


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    wide = select(x, mask).double()
    return wide - masked_mean(wide, mask)


def _count(batch: StatisticsInput, share: float) -> int:
    return max(1, int(share * int(batch.mask.sum())))


def _marked(batch: StatisticsInput, chosen: Tensor) -> Tensor:
    """[R]: 1 at the chosen positions, else 0, in the dtype of the log-probs."""
    out = torch.zeros_like(batch.log_probs)
    out[chosen] = 1
    return out


def _selected(tokens: PolicyLossInput) -> Tensor:
    assert tokens.selected is not None
    return (tokens.selected > 0) & tokens.mask
