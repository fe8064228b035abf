"""What an advantage estimator is given, and the views on it that estimators share.

Legend: S samples, R response tokens, V valid tokens (mask True), M voters: samples with at least one valid token,
G groups that have a voter. Statistics are float64 whatever comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInput:
    """The whole batch of one step, before any split. Samples may be in any order, groups of any size.

    rewards [R]: per token. A reward on a masked token counts too, see `ValidTokens`, so it must be finite.
    values [R]: critic's prediction before each token. mask [R] bool: tokens of the policy that take part, all False on
    padding and on rejected samples. offsets [S+1]. group [S]: equal for samples of one prompt. gamma, lam: discount
    and GAE's λ. norm_by_std: whether group estimators divide by the standard deviation.
    old_log_probs [R], sum_pi_squared [R] (Σ π² of the distribution the token was drawn from), rollout_is_weights [R].
    baseline [S]: score of the prompt's greedy response. components [S, K]: scores by reward key, component_weights [K]
    (None: all 1). What an estimator does not need may be None.
    """

    rewards: Tensor
    values: Tensor | None
    mask: Tensor
    offsets: Tensor
    group: Tensor
    gamma: float
    lam: float
    norm_by_std: bool = True
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    baseline: Tensor | None = None
    components: Tensor | None = None
    component_weights: Tensor | None = None


Estimator = Callable[[AdvantageInput], tuple[Tensor, Tensor]]
"""Gives (advantages [R], returns [R]) in the dtype of the rewards, both exact zero outside the mask."""


def needed(value: Tensor | None, estimator: str, what: str) -> Tensor:
    """The value. Raises ValueError when it is None."""
    if value is None:
        raise ValueError(f"{estimator} needs {what}")
    return value


@dataclass(frozen=True)
class ValidTokens:
    """The batch without its masked tokens.

    at [V]: where each valid token lies among the R, None when all of them are valid. offsets [S+1]: rows of valid
    tokens. rewards [V] float64: a reward on a masked token (tool output, a rejected token) was earned by what the
    policy did before it and is credited to the last valid token before it in the sample; one before the sample's first
    valid token has no action to credit and is left out. So a sample without valid tokens has no reward.
    """

    at: Tensor | None
    offsets: Tensor
    rewards: Tensor

    @staticmethod
    def of(batch: AdvantageInput) -> ValidTokens:
        """Positions, rows and credited rewards of the batch's valid tokens."""
        if bool(batch.mask.all()):
            return ValidTokens(None, batch.offsets, batch.rewards.double())
        at = batch.mask.nonzero().squeeze(1)
        offsets = torch.searchsorted(at, batch.offsets)
        rewards = batch.rewards.index_select(0, at).double()
        masked = (~batch.mask).nonzero().squeeze(1)
        stray = masked[batch.rewards.index_select(0, masked) != 0]
        sample = torch.searchsorted(batch.offsets, stray, right=True) - 1
        owner = torch.searchsorted(at, stray) - 1
        owned = owner >= offsets[sample]
        rewards.index_add_(0, owner[owned], batch.rewards[stray[owned]].double())
        return ValidTokens(at, offsets, rewards)

    @property
    def positions(self) -> Tensor:
        """[V]: `at`, also when all tokens are valid."""
        return torch.arange(self.rewards.numel(), device=self.rewards.device) if self.at is None else self.at

    def take(self, x: Tensor) -> Tensor:
        """[V] float64: the valid entries of x [R]; may be x itself."""
        return (x if self.at is None else x.index_select(0, self.at)).double()

    def spread(self, valid: Tensor, batch: AdvantageInput) -> Tensor:
        """valid [V] back to [R], zero elsewhere, in the dtype of the rewards."""
        narrow = valid.to(batch.rewards.dtype)
        return narrow if self.at is None else torch.zeros_like(batch.rewards).index_copy_(0, self.at, narrow)


@dataclass(frozen=True)
class Voters:
    """The samples that count in group statistics: those with a valid token. A rejected sample is none.

    sample [M]: index among the S, ascending. lengths [M]: valid tokens. scores [M] float64: sum of credited rewards.
    group [M]: 0..G-1. counts [G]: voters of each group.
    """

    sample: Tensor
    lengths: Tensor
    scores: Tensor
    group: Tensor
    counts: Tensor

    @staticmethod
    def of(batch: AdvantageInput, tokens: ValidTokens) -> Voters:
        """The voters of the batch."""
        lengths = tokens.offsets.diff()
        sample = (lengths > 0).nonzero().squeeze(1)
        lengths = lengths[sample]
        owner = torch.repeat_interleave(torch.arange(sample.numel(), device=sample.device), lengths)
        scores = tokens.rewards.new_zeros(sample.numel()).index_add_(0, owner, tokens.rewards)
        _, group, counts = torch.unique(batch.group[sample], return_inverse=True, return_counts=True)
        return Voters(sample, lengths, scores, group, counts)

    @property
    def alone(self) -> Tensor:
        """[M] bool: the only voter of its group."""
        return self.counts[self.group] == 1

    def group_sum(self, x: Tensor) -> Tensor:
        """[M]: Σ of x [M] over the voter's group, itself included."""
        return x.new_zeros(self.counts.numel()).index_add_(0, self.group, x)[self.group]

    def group_max(self, x: Tensor) -> Tensor:
        """[M]: largest x [M] of the voter's group."""
        largest = x.new_full((self.counts.numel(),), -torch.inf)
        return largest.scatter_reduce_(0, self.group, x, "amax")[self.group]

    def per_token(self, x: Tensor) -> Tensor:
        """[V]: x [M] at every valid token of the sample."""
        return torch.repeat_interleave(x, self.lengths)
