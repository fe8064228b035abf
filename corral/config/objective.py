"""The mathematics of a run as plans: how advantages are made of rewards, and what actor and critic minimise."""

from __future__ import annotations

import os

from corral.config import names
from corral.config.correction import rollout_correction
from corral.config.paths import local_path
from corral.config.plan import (
    PFPPO,
    ActorUpdate,
    AlgorithmPlan,
    CriticUpdate,
    FilterGroups,
    KLControl,
    PolicyLossOptions,
)
from corral.config.schema.actor import Actor
from corral.config.schema.algorithm import Algorithm
from corral.config.schema.root import Config
from corral.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_NORM = "seq-mean-token-sum-norm"


def needs_critic(config: Config) -> bool:
    """What critic.enable says, else what the estimator reads; a user's estimator gets values when it is enabled."""
    if config.critic.enable is not None:
        return config.critic.enable
    facts = names.ESTIMATORS.get(names.estimator(config.algorithm.adv_estimator))
    return facts is not None and facts.critic


def algorithm_plan(config: Config) -> AlgorithmPlan:
    """From rewards to advantages."""
    algorithm = config.algorithm
    estimator = names.estimator(algorithm.adv_estimator)
    facts = names.ESTIMATORS.get(estimator)
    keys = tuple(algorithm.gdpo_reward_keys or ())
    control = algorithm.kl_ctrl
    return AlgorithmPlan(
        adv_estimator=_function("algorithm.adv_estimator", estimator),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        use_kl_in_reward=algorithm.use_kl_in_reward,
        kl_penalty=algorithm.kl_penalty,
        kl_ctrl=KLControl(control.type, control.kl_coef, control.horizon, control.target_kl),
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gdpo_reward_keys=keys,
        gdpo_reward_weights=tuple(algorithm.gdpo_reward_weights or (1.0,) * len(keys)),
        filter_groups=_filter_groups(algorithm),
        pf_ppo=PFPPO(algorithm.pf_ppo.reweight_method, algorithm.pf_ppo.weight_pow) if algorithm.use_pf_ppo else None,
        rollout_correction=rollout_correction(algorithm.rollout_correction),
        sum_pi_squared=facts.sum_pi_squared if facts else config.actor_rollout_ref.actor.calculate_sum_pi_squared,
        seed=config.data.seed,
    )


def _filter_groups(algorithm: Algorithm) -> FilterGroups | None:
    given = algorithm.filter_groups
    if not given.enable:
        return None
    metric = str(given.metric)  # checked before: never null here
    return FilterGroups(names.METRIC_ALIASES.get(metric, metric), given.max_num_gen_batches)


def actor_update(config: Config) -> ActorUpdate:
    """The policy's objective and its optimizer steps. rollout_correction.bypass_mode brings a loss of its own."""
    actor, data = config.actor_rollout_ref.actor, config.data
    bypass = config.algorithm.rollout_correction.bypass_mode
    mode = "bypass_mode" if bypass else names.loss(actor.policy_loss.loss_mode)
    facts = names.LOSSES.get(mode)
    aggregation = (facts.aggregation if facts else None) or actor.loss_agg_mode
    return ActorUpdate(
        mini_batch_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        shuffle_seed=actor.data_loader_seed,
        loss_mode=_function(f"{_ACTOR}.policy_loss.loss_mode", mode),
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=aggregation,
        loss_scale_factor=_loss_scale(aggregation, actor.loss_scale_factor, data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        calculate_entropy=actor.calculate_entropy,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        optimizer_steps=_optimizer_steps(_ACTOR, actor.ppo_mini_batch_size, actor.ppo_epochs, data.train_batch_size),
        options=_options(actor),
        selection_seed=actor.data_loader_seed,
    )


def _options(actor: Actor) -> PolicyLossOptions:
    chosen = actor.policy_loss
    return PolicyLossOptions(
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        clip_cov_ratio=chosen.clip_cov_ratio,
        clip_cov_lb=chosen.clip_cov_lb,
        clip_cov_ub=chosen.clip_cov_ub,
        kl_cov_ratio=chosen.kl_cov_ratio,
        ppo_kl_coef=chosen.ppo_kl_coef,
        dro_beta=chosen.dro_beta,
    )


def critic_update(config: Config) -> CriticUpdate:
    """The value function's objective and its optimizer steps."""
    critic, data = config.critic, config.data
    return CriticUpdate(
        mini_batch_prompts=critic.ppo_mini_batch_size,
        epochs=critic.ppo_epochs,
        shuffle=critic.shuffle,
        shuffle_seed=critic.data_loader_seed,
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
        loss_scale_factor=_loss_scale(critic.loss_agg_mode, critic.loss_scale_factor, data.max_response_length),
        optimizer_steps=_optimizer_steps(
            "critic", critic.ppo_mini_batch_size, critic.ppo_epochs, data.train_batch_size
        ),
    )


def _optimizer_steps(block: str, mini: int, epochs: int, train_batch: int) -> int:
    """Optimizer steps of one iteration; every mini-batch has the same number of prompts."""
    if train_batch % mini:
        raise ConfigError(
            f"data.train_batch_size={train_batch} is not a multiple of {block}.ppo_mini_batch_size={mini} (both count "
            f"prompts); use {max(1, train_batch // mini) * mini} prompts, or a mini-batch that divides {train_batch}"
        )
    return train_batch // mini * epochs


def _loss_scale(mode: str, factor: float | None, response_length: int) -> float | None:
    """The norm mode divides by a length; the cap is the one length that does not depend on how a batch is cut."""
    return float(response_length) if mode == _NORM and factor is None else factor


def _function(key: str, name: str) -> str:
    """A name as it is; an import path with its file absolute, because workers run in other working directories.

    Raises ConfigError for an import path that cannot be one; the code behind it is not run.
    """
    if not names.is_import_path(name):
        return name
    source, _, function = name.rpartition(":")
    is_file = source.endswith(".py") or "/" in source
    module_like = all(part.isidentifier() for part in source.split("."))
    if not function.isidentifier() or not (is_file or module_like):
        raise ConfigError(f"{key}={name}: a function is named file.py:function or package.module:function")
    if not is_file:
        return name
    file = local_path(source)
    if not os.path.isfile(file):
        raise ConfigError(f"{key}={name}: {file} is not a file")
    return f"{file}:{function}"
