"""Advantages from the reward to go minus a baseline that is not a critic's."""

from __future__ import annotations

import torch
from torch import Tensor

from corral.algorithms.advantage_input import AdvantageInput, ValidTokens, Voters, needed
from corral.algorithms.segments import discounted_suffix_sums

_EPSILON = 1e-8


def remax(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go minus the score of the prompt's greedy response (Li et al., 2023, arXiv:2310.10505).

    returns: the reward to go. Raises ValueError without a baseline.
    """
    baseline = needed(batch.baseline, "remax", "the score of each prompt's greedy response").double()
    tokens = ValidTokens.of(batch)
    to_go = discounted_suffix_sums(tokens.rewards, tokens.offsets, 1.0)
    advantages = to_go - torch.repeat_interleave(baseline, tokens.offsets.diff())
    return tokens.spread(advantages, batch), tokens.spread(to_go, batch)


def optimal_token_baseline(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go G_t minus the group's baseline of minimal variance at the same token t of the response.

    B_t = Σ G_t W_t / (Σ W_t + 1e-8) over the samples of the group whose token t is valid; W_t = Σ_{j ≤ t} w_j² ·
    (1 − 2π_j + Σπ_j²) over valid tokens stands for the squared norm of the score function up to t, w the rollout
    correction's weights if there are any. Where fewer than two samples have a valid token t the baseline is 0: one
    sample alone would be its own baseline. For responses without masked tokens that is beyond the second longest.
    returns = G.

    Raises ValueError without old log-probs or sum_pi_squared.
    """
    tokens = ValidTokens.of(batch)
    sample = torch.repeat_interleave(batch.offsets[:-1], tokens.offsets.diff())
    return _minus_optimal_baseline("optimal_token_baseline", batch, tokens, tokens.positions - sample)


def tir_optimal_token_baseline(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` with t counting valid tokens only: turns of tools do not shift what is compared."""
    tokens = ValidTokens.of(batch)
    start = torch.repeat_interleave(tokens.offsets[:-1], tokens.offsets.diff())
    time = torch.arange(start.numel(), device=start.device) - start
    return _minus_optimal_baseline("tir_optimal_token_baseline", batch, tokens, time)


def _minus_optimal_baseline(
    name: str, batch: AdvantageInput, tokens: ValidTokens, time: Tensor
) -> tuple[Tensor, Tensor]:
    """time [V]: valid tokens of one group with equal time are compared."""
    to_go = discounted_suffix_sums(tokens.rewards, tokens.offsets, 1.0)
    weights = _prefix_sums(_squared_norms(name, batch, tokens), tokens.offsets)

    voters = Voters.of(batch, tokens)
    width = int(time.max()) + 1 if time.numel() else 0
    cell = voters.per_token(voters.group) * width + time  # one for each group and time
    cells = voters.counts.numel() * width
    total, weighted, count = (
        to_go.new_zeros(cells).index_add_(0, cell, x) for x in (weights, weights * to_go, torch.ones_like(to_go))
    )
    baseline = torch.where(count > 1, weighted / (total + _EPSILON), 0.0)
    return tokens.spread(to_go - baseline[cell], batch), tokens.spread(to_go, batch)


def _squared_norms(name: str, batch: AdvantageInput, tokens: ValidTokens) -> Tensor:
    """[V]: ‖e_token − π‖² = 1 − 2π + Σπ², times the squared rollout weight; not below 0, where rounding could take
    it."""
    pi = tokens.take(needed(batch.old_log_probs, name, "old log-probs")).exp()
    sum_pi_squared = tokens.take(needed(batch.sum_pi_squared, name, "sum_pi_squared of every token"))
    norms = (1 - 2 * pi + sum_pi_squared).clamp(min=0)
    if batch.rollout_is_weights is not None:
        norms *= tokens.take(batch.rollout_is_weights).square()
    return norms


def _prefix_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """[V]: Σ of x up to and including each token inside its sample, by sums over the mirrored rows: differences of one
    running sum over the whole batch would lose digits."""
    return discounted_suffix_sums(x.flip(0), x.numel() - offsets.flip(0), 1.0).flip(0)
