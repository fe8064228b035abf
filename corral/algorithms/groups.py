"""Advantages from comparing the scores of the samples of one prompt: one number a sample, at all its valid tokens.

s is a sample's score, the sum of its credited rewards; μ, σ the mean and unbiased standard deviation of its group.
Only samples with a valid token vote, so a rejected one moves nobody's baseline; see `Voters`. returns = advantages:
there is no critic that could predict anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corral.algorithms.advantage_input import AdvantageInput, ValidTokens, Voters, needed
from corral.algorithms.masked import standardised

_EPSILON = 1e-6


def grpo(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """(s − μ) / (σ + 1e-6) (Shao et al., 2024, arXiv:2402.03300), or s − μ without norm_by_std (Dr.GRPO, Liu et al.,
    2025, arXiv:2503.20783). The only voter of a group keeps s."""
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    return _broadcast(_compared(voters.scores, voters, batch.norm_by_std), voters, tokens, batch)


def grpo_passk(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """The group's best sample gets (s_max − second best) [/ (σ + 1e-6)], all others 0 (Tang et al., 2025,
    arXiv:2503.19595).

    A tie for the best, or a group with one voter left after rejection, gives 0. Raises ValueError for a group that has
    one sample from the start.
    """
    _, inverse, sizes = torch.unique(batch.group, return_inverse=True, return_counts=True)
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    single = (sizes[inverse][voters.sample] == 1).sum()
    if single:
        raise ValueError(f"grpo_passk needs groups of at least 2 samples; {int(single)} groups have one")

    number = torch.arange(voters.sample.numel(), device=voters.sample.device).double()
    best = voters.group_max(voters.scores)
    winner = number == voters.group_max(torch.where(voters.scores == best, number, -1.0))
    second = voters.group_max(torch.where(winner, -torch.inf, voters.scores))
    lead = torch.where(winner & ~voters.alone, best - second, 0.0)
    if batch.norm_by_std:
        lead /= _std(_deviations(voters.scores, voters), voters) + _EPSILON
    return _broadcast(lead, voters, tokens, batch)


def gdpo(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Each reward key compared in its group on its own as grpo does, summed with weights, whitened over the valid
    tokens of the batch (Liu et al., 2026, arXiv:2601.05242).

    Reads the components, not the rewards. Raises ValueError without components.
    """
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    components = needed(batch.components, "gdpo", "the scores by reward key")[voters.sample].double()
    weights = batch.component_weights
    weights = components.new_ones(components.shape[1]) if weights is None else weights.double()
    total = torch.zeros_like(voters.scores)
    for component, weight in zip(components.unbind(1), weights, strict=True):
        total += weight * _compared(component, voters, batch.norm_by_std)
    return _broadcast(total, voters, tokens, batch, whitened=True)


def reinforce_plus_plus_baseline(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """s − μ, whitened over the valid tokens of the batch (Hu, 2025, arXiv:2501.03262). The only voter of a group
    keeps s."""
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    return _broadcast(_compared(voters.scores, voters, by_std=False), voters, tokens, batch, whitened=True)


def rloo(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """s minus the mean of the other voters of the group (Ahmadian et al., 2024, arXiv:2402.14740), as
    n / (n − 1) · (s − μ). The only voter of a group gets 0: there is nothing to compare it with."""
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    count = voters.counts[voters.group]
    return _broadcast(_deviations(voters.scores, voters) * count / (count - 1).clamp(min=1), voters, tokens, batch)


def opo(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """s − Σ len · s / Σ len over the group, len in valid tokens (Hao et al., 2025, arXiv:2505.23585). The only voter
    of a group gets 0."""
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    shifted = _shifted(voters.scores, voters)
    baseline = voters.group_sum(voters.lengths * shifted) / voters.group_sum(voters.lengths)
    return _broadcast(shifted - baseline, voters, tokens, batch)


def gpg(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """α · (s − μ), α = voters / voters with a score other than 0 (Chu et al., 2025, arXiv:2504.02546). The only voter
    of a group gets 0."""
    tokens = ValidTokens.of(batch)
    voters = Voters.of(batch, tokens)
    alpha = voters.scores.numel() / voters.scores.count_nonzero().clamp(min=1).double()
    return _broadcast(alpha * _deviations(voters.scores, voters), voters, tokens, batch)


def _compared(scores: Tensor, voters: Voters, by_std: bool) -> Tensor:
    """[M]: s − μ, over σ + 1e-6 when by_std; s itself for the only voter of a group."""
    deviations = _deviations(scores, voters)
    if by_std:
        deviations = deviations / (_std(deviations, voters) + _EPSILON)
    return torch.where(voters.alone, scores, deviations)


def _shifted(scores: Tensor, voters: Voters) -> Tensor:
    """[M]: scores above the lowest of the group; equal scores give exact zeros, whose mean has no rounding."""
    return scores + voters.group_max(-scores)


def _deviations(scores: Tensor, voters: Voters) -> Tensor:
    """[M]: s − μ, exactly 0 where all scores of the group are equal."""
    shifted = _shifted(scores, voters)
    return shifted - voters.group_sum(shifted) / voters.counts[voters.group]


def _std(deviations: Tensor, voters: Voters) -> Tensor:
    """[M]: σ from deviations, not from differences of squares; 0 for the only voter of a group."""
    return (voters.group_sum(deviations.square()) / (voters.counts[voters.group] - 1).clamp(min=1)).sqrt()


def _broadcast(
    advantages: Tensor, voters: Voters, tokens: ValidTokens, batch: AdvantageInput, whitened: bool = False
) -> tuple[Tensor, Tensor]:
    """advantages [M] at every valid token of the voters, as (advantages [R], returns [R])."""
    valid = voters.per_token(advantages)
    spread = tokens.spread(standardised(valid) if whitened else valid, batch)
    return spread, spread
