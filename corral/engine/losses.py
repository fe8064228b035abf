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
from corral.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInput
from corral.algorithms.value_loss import clipped_value_loss
from corral.batch import Batch
from corral.config.plan import ActorUpdate, CriticUpdate

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

    predicted: log_probs [n], entropy [n] if needs_entropy. tokens: old_log_probs, advantages, ref_log_probs
    if use_kl_loss. Statistics: loss, pg_loss, kl_loss (if used), entropy_loss (if computed); pg_clipfrac,
    pg_clipfrac_lower, ppo_kl are token means.
    """

    update: ActorUpdate
    denominators: Denominators

    @property
    def needs_entropy(self) -> bool:
        return self.update.calculate_entropy or self.update.entropy_coeff != 0

    def token_weights(self, batch: Batch) -> Tensor:
        return _weights(self.update, batch, self.denominators, batch.advantages)

    def __call__(self, predicted: Mapping[str, Tensor], tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        mask, weight = _seen(tokens), tokens["weight"]
        policy, happened = POLICY_LOSSES[self.update.loss_mode](
            PolicyLossInput(
                log_probs=predicted["log_probs"],
                old_log_probs=tokens["old_log_probs"],
                advantages=tokens["advantages"],
                mask=mask,
                clip_low=self.update.clip_ratio_low,
                clip_high=self.update.clip_ratio_high,
                clip_c=self.update.clip_ratio_c,
            )
        )
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
            "pg_clipfrac": _token_mean(happened["clipped"], self.denominators),
            "pg_clipfrac_lower": _token_mean(happened["clipped_lower"], self.denominators),
            "ppo_kl": _token_mean(happened["kl"], self.denominators),
        }


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
        return _weights(self.update, batch, self.denominators, batch.returns)

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
    update: ActorUpdate | CriticUpdate, batch: Batch, denominators: Denominators, like: Tensor | None
) -> Tensor:
    mode, scale = update.loss_agg_mode, update.loss_scale_factor
    dtype = torch.float32 if like is None else like.dtype
    return token_weights(mode, loss_mask(batch), batch.response_offsets, denominators, scale, dtype=dtype)


def _seen(tokens: Tokens) -> Tensor:
    """[n] bool. A padding sample has weight zero whatever its mask says, and statistics must not see it either."""
    return tokens["mask"] & (tokens["weight"] != 0)


def _token_mean(x: Tensor, denominators: Denominators) -> Tensor:
    """This slice's part of the mean of x [n], zero outside the mask, over the valid tokens of the whole mini-batch."""
    return x.sum() / max(denominators.tokens, 1)
