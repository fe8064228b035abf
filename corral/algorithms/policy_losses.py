"""Policy losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from corral.algorithms.hooks import load
from corral.algorithms.masked import select
from corral.algorithms.policy_losses_interface import (
    Loss,
    PolicyLoss,
    PolicyLossInput,
    StatisticsInput,
    advantages_of,
    log_ratio_of,
)
from corral.algorithms.policy_losses_selection import clip_cov, kl_cov, largest, within_band
from corral.algorithms.policy_losses_sequence import geo_mean, gspo, mean_bounded_log_ratio, mean_log_ratio
from corral.algorithms.policy_losses_token import cispo, dppo_kl, dppo_tv, dro, gpg, sapo, vanilla
from corral.algorithms.rollout_correction import Settings, importance_weights

_MEAN_OF_MEANS = "seq-mean-token-mean"


class BypassSettings(Settings, Protocol):
    """Rollout correction with the engine's log-probs as old ones. loss_type: ppo_clip or reinforce."""

    @property
    def loss_type(self) -> str: ...


def reinforce(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """L = −A · log π; the objective multiplies it by the importance weights of `present_weights`. ppo_kl: −d."""
    loss = -advantages_of(tokens) * select(tokens.log_probs, tokens.mask)
    return loss, {"ppo_kl": -log_ratio_of(tokens).detach()}


def present_weights(batch: StatisticsInput) -> dict[str, Tensor]:
    """For `bypass_mode` with reinforce: rollout_is_weights of the present policy against the one that generated."""
    assert batch.correction is not None
    return {
        "rollout_is_weights": importance_weights(
            batch.correction, batch.log_probs, batch.old_log_probs, batch.mask, batch.offsets
        )
    }


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "gspo": PolicyLoss(gspo, statistics=mean_log_ratio, aggregation=_MEAN_OF_MEANS),
    "sapo": PolicyLoss(sapo, aggregation=_MEAN_OF_MEANS),
    "gpg": PolicyLoss(gpg),
    "clip_cov": PolicyLoss(clip_cov, statistics=within_band),
    "kl_cov": PolicyLoss(kl_cov, statistics=largest),
    "geo_mean": PolicyLoss(geo_mean, statistics=mean_bounded_log_ratio, aggregation=_MEAN_OF_MEANS),
    "dro": PolicyLoss(dro),
    "cispo": PolicyLoss(cispo),
    "bypass_mode": PolicyLoss(vanilla),  # old log-probs are the engine's; see `policy_loss`
}


def policy_loss(name: str, correction: BypassSettings | None = None) -> PolicyLoss:
    """The loss of a name, or of a user's import path ("file.py:loss", "module:loss"): a `Loss` or a `PolicyLoss`.

    bypass_mode depends on the settings of rollout correction: `vanilla` for ppo_clip, whose ratio already is that to
    the engine; for reinforce the policy gradient, weighted if rollout_is is set. ConfigError as `hooks.load`.
    """
    if name == "bypass_mode" and correction is not None and correction.loss_type == "reinforce":
        return PolicyLoss(reinforce, statistics=None if correction.rollout_is is None else present_weights)
    found: Loss | PolicyLoss = load(name, POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
    return found if isinstance(found, PolicyLoss) else PolicyLoss(found)
