"""What an engine minimises: the actor's and the critic's objective over any slice of a mini-batch's tokens.

An objective is a plain frozen dataclass that travels to the workers. It holds the denominators of its whole
mini-batch, so whatever the engine cuts (ranks, micro-batches, sequence slices), losses, gradients and statistics of
the parts add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from corral.algorithms.aggregate import Denominators, loss_mask, token_weights
from corral.algorithms.kl import kl
from corral.algorithms.masked import select
from corral.algorithms.policy_losses import policy_loss
from corral.algorithms.policy_losses_interface import PolicyLoss, PolicyLossInput, StatisticsInput
from corral.algorithms.policy_losses_selection import token_draws
from corral.algorithms.value_loss import clipped_value_loss
from corral.batch import Batch
from corral.config.plan import ActorUpdate, CriticUpdate, RolloutCorrection

_STATISTICS = ("sequence_log_ratio", "sequence_advantage", "selected")

Tokens = Mapping[str, Tensor]
"""[n] for each of a slice's n response tokens: mask (bool), weight (from `token_weights`), the batch's float
fields."""


class Objective(Protocol):
    """Called with predictions of the model and the batch's tokens, for one slice at a time."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `predicted` has to hold the entropy."""
        ...

    def token_weights(self, batch: Batch) -> Tensor:
        """[R] for whole samples: zero outside the mask and on padding samples. Called before packing."""
        ...

    def __call__(self, predicted: Mapping[str, Tensor], tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, statistics) of the slice: scalars whose sums over all slices of all ranks are the mini-batch's
        values.

        The loss is attached to the predictions' graph also when n is 0 or every token is masked, and is then exactly
        0. Statistics are detached.
        """
        ...


@dataclass(frozen=True)
class ActorObjective:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL to the reference, all aggregated alike.

    correction: settings of rollout correction. predicted: log_probs [n], entropy [n] if needs_entropy. tokens:
    old_log_probs, advantages, ref_log_probs if use_kl_loss, rollout_is_weights if there are any (they multiply the
    policy loss), and what `with_statistics` adds. Statistics: loss, pg_loss, kl_loss (if used), entropy_loss (if
    computed); those of the policy loss, such as pg_clipfrac and ppo_kl, are token means.
    """

    update: ActorUpdate
    denominators: Denominators
    correction: RolloutCorrection | None = None

    @property
    def needs_entropy(self) -> bool:
        return self.update.calculate_entropy or self.update.entropy_coeff != 0

    @property
    def policy_loss(self) -> PolicyLoss:
        return policy_loss(self.update.loss_mode, self.correction)

    def token_weights(self, batch: Batch) -> Tensor:
        mode = self.policy_loss.aggregation or self.update.loss_agg_mode
        return _weights(self.update, mode, batch, self.denominators, batch.advantages)

    def __call__(self, predicted: Mapping[str, Tensor], tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        mask, weight = _seen(tokens), tokens["weight"]
        policy, happened = self._policy(predicted["log_probs"], tokens, mask)
        terms = {"pg_loss": (weight * policy).sum()}
        loss = terms["pg_loss"]
        if self.needs_entropy:
            terms["entropy_loss"] = (weight * select(predicted["entropy"], mask)).sum()
            if self.update.entropy_coeff != 0:
                loss = loss - self.update.entropy_coeff * terms["entropy_loss"]
        if self.update.use_kl_loss:
            penalty = kl(predicted["log_probs"], tokens["ref_log_probs"], mask, self.update.kl_loss_type)
            terms["kl_loss"] = (weight * penalty).sum()
            loss = loss + self.update.kl_loss_coef * terms["kl_loss"]
        return loss, {
            **{name: term.detach() for name, term in {**terms, "loss": loss}.items()},
            **{
                name: _token_mean(select(x.detach().to(weight.dtype), mask), self.denominators)
                for name, x in happened.items()
            },
        }

    def _policy(self, log_probs: Tensor, tokens: Tokens, mask: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The policy loss [n] with its importance weights, and its statistics [n]."""
        per_token, happened = self.policy_loss.loss(
            PolicyLossInput(
                log_probs=log_probs,
                old_log_probs=tokens["old_log_probs"],
                advantages=tokens["advantages"],
                mask=mask,
                clip_low=self.update.clip_ratio_low,
                clip_high=self.update.clip_ratio_high,
                clip_c=self.update.clip_ratio_c,
                options=self.update.options,
                **{name: tokens[name] for name in _STATISTICS if name in tokens},
            )
        )
        if "rollout_is_weights" in tokens:
            per_token = per_token * select(tokens["rollout_is_weights"], mask)
        return per_token, happened


def needs_statistics(update: ActorUpdate, correction: RolloutCorrection | None) -> bool:
    """Whether the policy loss has to know the present log-probs of a whole mini-batch before its optimizer step."""
    return policy_loss(update.loss_mode, correction).statistics is not None


def with_statistics(
    mini_batch: Batch,
    log_probs: Tensor,
    update: ActorUpdate,
    correction: RolloutCorrection | None,
    key: tuple[int, ...],
) -> Batch:
    """The whole mini-batch with what its policy loss has to know of it, from log_probs [R] at the present weights.

    key: of the random choice, together with the update's selection_seed: the step, and which of the step's mini-batches
    this is.
    """
    statistics = policy_loss(update.loss_mode, correction).statistics
    assert statistics is not None
    assert mini_batch.old_log_probs is not None
    assert mini_batch.advantages is not None
    found = statistics(
        StatisticsInput(
            log_probs=log_probs,
            old_log_probs=mini_batch.old_log_probs,
            advantages=mini_batch.advantages,
            mask=loss_mask(mini_batch),
            offsets=mini_batch.response_offsets,
            clip_low=update.clip_ratio_low,
            clip_high=update.clip_ratio_high,
            clip_c=update.clip_ratio_c,
            options=update.options,
            draw=token_draws(mini_batch, update.selection_seed, *key),
            correction=correction,
        )
    )
    return mini_batch.with_fields(**found)


@dataclass(frozen=True)
class CriticObjective:
    """Clipped value loss. predicted: values [n]. tokens: values (before the update) and returns.

    Statistics: loss and vf_loss (the same number); vf_clipfrac and vpred_mean are token means.
    """

    update: CriticUpdate
    denominators: Denominators

    @property
    def needs_entropy(self) -> bool:
        return False

    def token_weights(self, batch: Batch) -> Tensor:
        return _weights(self.update, self.update.loss_agg_mode, batch, self.denominators, batch.returns)

    def __call__(self, predicted: Mapping[str, Tensor], tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        mask, values = _seen(tokens), predicted["values"]
        per_token, clipped = clipped_value_loss(
            values, tokens["values"], tokens["returns"], mask, self.update.cliprange_value
        )
        loss = (tokens["weight"] * per_token).sum()
        return loss, {
            "loss": loss.detach(),
            "vf_loss": loss.detach(),
            "vf_clipfrac": _token_mean(clipped, self.denominators),
            "vpred_mean": _token_mean(select(values.detach(), mask), self.denominators),
        }


def _weights(
    update: ActorUpdate | CriticUpdate, mode: str, batch: Batch, denominators: Denominators, like: Tensor | None
) -> Tensor:
    scale = update.loss_scale_factor
    dtype = torch.float32 if like is None else like.dtype
    return token_weights(mode, loss_mask(batch), batch.response_offsets, denominators, scale, dtype=dtype)


def _seen(tokens: Tokens) -> Tensor:
    """[n] bool. A padding sample has weight zero whatever its mask says, and statistics must not see it either."""
    return tokens["mask"] & (tokens["weight"] != 0)


def _token_mean(x: Tensor, denominators: Denominators) -> Tensor:
    """This slice's part of the mean of x [n], zero outside the mask, over the valid tokens of the whole mini-batch."""
    return x.sum() / max(denominators.tokens, 1)
