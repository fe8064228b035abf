"""From log-probs and scores to advantages: rollout correction, KL in the reward, the estimator, resampling."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corral.algorithms.advantages import AdvantageInput, Estimator
from corral.algorithms.kl import kl_in_reward
from corral.algorithms.resampling import resample
from corral.algorithms.rollout_correction import correct, mismatch
from corral.algorithms.segments import mean_of_sample_means, valid_offsets
from corral.batch import Batch
from corral.config.plan import AlgorithmPlan
from corral.trainer.collection import Collected
from corral.trainer.kl_coefficient import KLCoefficient
from corral.trainer.metrics import prefixed
from corral.trainer.scoring import values_of


def corrected(algorithm: AlgorithmPlan, batch: Batch, present: Tensor | None) -> tuple[Batch, dict[str, float]]:
    """The batch with old log-probs, and with what rollout_correction makes of their gap to the engine's.

    present [R]: the trainer's log-probs at the weights that generated; None when bypass_mode left them out. Rejected
    tokens leave the response mask, so nothing after this sees them. With bypass_mode the old log-probs are the
    engine's, and its policy loss makes its own weights, at the weights of each optimizer step.
    """
    rule, engine = algorithm.rollout_correction, batch.rollout_log_probs
    assert engine is not None
    if present is None:
        return batch.with_fields(old_log_probs=engine), {}
    metrics = mismatch(present, engine, batch.response_mask, batch.response_offsets)
    if rule is None:
        return batch.with_fields(old_log_probs=present), prefixed("rollout_corr", metrics)
    if rule.bypass_mode:
        rule = replace(rule, rollout_is=None)
    done = correct(rule, present, engine, batch.response_mask, batch.response_offsets)
    batch = batch.with_fields(old_log_probs=engine if rule.bypass_mode else present, response_mask=done.mask)
    if done.weights is not None:
        batch = batch.with_fields(rollout_is_weights=done.weights)
    return batch, prefixed("rollout_corr", {**metrics, **done.metrics})


def with_rewards(algorithm: AlgorithmPlan, batch: Batch, coefficient: KLCoefficient) -> tuple[Batch, dict[str, float]]:
    """The batch with its rewards: scores, less the KL to the reference when that is part of the reward."""
    assert batch.scores is not None
    if not algorithm.use_kl_in_reward:
        return batch.with_fields(rewards=batch.scores), {}
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    used = coefficient.value
    rewards, penalty = kl_in_reward(
        batch.scores, batch.old_log_probs, batch.ref_log_probs, batch.response_mask, used, algorithm.kl_penalty
    )
    mean_kl = float(mean_of_sample_means(penalty, batch.response_mask, batch.response_offsets))
    coefficient.follow(mean_kl, len(batch))
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": used}
    return batch.with_fields(rewards=rewards), metrics


def with_advantages(
    estimator: Estimator, algorithm: AlgorithmPlan, batch: Batch, collected: Collected
) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages and returns.

    Raises DataError when a scorer did not return a value of gdpo_reward_keys, or a user's estimator returns nonsense.
    """
    assert batch.rewards is not None
    components, metrics = None, {}
    if algorithm.gdpo_reward_keys:
        components = _components(algorithm, batch, collected)
        means = components.mean(dim=0).tolist()
        metrics = {f"gdpo/{key}/mean": mean for key, mean in zip(algorithm.gdpo_reward_keys, means, strict=True)}
    advantages, returns = estimator(
        AdvantageInput(
            rewards=batch.rewards,
            values=None if batch.values is None else batch.values.double(),
            mask=batch.response_mask,
            offsets=batch.response_offsets,
            group=batch.group,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            old_log_probs=batch.old_log_probs,
            sum_pi_squared=batch.sum_pi_squared,
            rollout_is_weights=batch.rollout_is_weights,
            baseline=collected.baseline,
            components=components,
            component_weights=torch.tensor(algorithm.gdpo_reward_weights, dtype=torch.float64),
        )
    )
    return batch.with_fields(advantages=advantages, returns=returns), metrics


def _components(algorithm: AlgorithmPlan, batch: Batch, collected: Collected) -> Tensor:
    """[S, K] float64: the scores by reward key."""
    rows = batch.row.tolist()
    return torch.stack(
        [values_of(collected.scores, rows, key, "algorithm.gdpo_reward_keys") for key in algorithm.gdpo_reward_keys],
        dim=1,
    )


def resampled(algorithm: AlgorithmPlan, batch: Batch, scores: Tensor, step: int) -> Batch:
    """What the updates train on: the batch, or with pf_ppo as many samples drawn by their scores [S]."""
    rule = algorithm.pf_ppo
    if rule is None:
        return batch
    votes = valid_offsets(batch.response_mask, batch.response_offsets).diff() > 0
    drawn = resample(scores, votes, rule.reweight_method, rule.weight_pow, algorithm.seed, step)
    return batch.select(drawn)
