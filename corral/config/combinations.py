"""Checks of values that have to fit each other: estimator against samples, loss against options, resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from corral.config import names
from corral.config.names import check_name
from corral.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
_N = "actor_rollout_ref.rollout.n"
_CORRECTION = "algorithm.rollout_correction"


def check_functions(values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless estimator and loss are known names or import paths."""
    for key, known, aliases, meant in (
        ("algorithm.adv_estimator", tuple(names.ESTIMATORS), tuple(names.ESTIMATOR_ALIASES), names.estimator),
        (f"{_LOSS}.loss_mode", tuple(names.LOSSES), (), names.loss),
    ):
        if not names.is_import_path(values[key]) and meant(values[key]) not in known:
            check_name(key, values[key], (*known, *aliases))


def check_combinations(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first pair of keys that cannot run together. Names are known to be right."""
    estimator = names.estimator(values["algorithm.adv_estimator"])
    _check_groups(values, estimator)
    _check_critic(values, estimator)
    if estimator == "gdpo":
        _check_gdpo(values)
    _check_kl_control(values)
    _check_loss(values)
    _check_correction(values)


def _check_groups(values: Mapping[str, Any], estimator: str) -> None:
    facts = names.ESTIMATORS.get(estimator)
    n = values[_N]
    if n == 1 and facts and facts.groups:
        raise ConfigError(
            f"algorithm.adv_estimator={values['algorithm.adv_estimator']} compares the samples of a prompt and {_N}=1 "
            f"gives it one; set {_N} to 2 or more (8 is usual)"
        )
    if not values["algorithm.filter_groups.enable"]:
        return
    if n == 1:
        raise ConfigError(
            f"algorithm.filter_groups.enable=True drops prompts whose samples all score alike, and with {_N}=1 all do; "
            f"set {_N} to 2 or more"
        )
    if not values["algorithm.filter_groups.metric"]:
        raise ConfigError(
            "algorithm.filter_groups.enable=True needs algorithm.filter_groups.metric; set it to score, reward, or a "
            "value that your scorer returns, such as acc"
        )
    metric = str(values["algorithm.filter_groups.metric"])
    if names.METRIC_ALIASES.get(metric, metric) == "reward" and values["algorithm.use_kl_in_reward"]:
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric} with algorithm.use_kl_in_reward=True: the KL makes the rewards "
            "of every group differ, so nothing would be dropped; set the metric to score"
        )


def _check_critic(values: Mapping[str, Any], estimator: str) -> None:
    facts, enable = names.ESTIMATORS.get(estimator), values["critic.enable"]
    if facts and facts.critic and enable is False:
        raise ConfigError(
            f"critic.enable=False with algorithm.adv_estimator={estimator}: it needs the critic's values; remove it"
        )
    if facts and not facts.critic and enable:
        raise ConfigError(
            f"critic.enable=True with algorithm.adv_estimator={estimator}: it reads no values, so a critic would be "
            "trained for nothing; remove it"
        )
    if values["algorithm.use_pf_ppo"] and estimator != "gae":
        raise ConfigError(
            f"algorithm.use_pf_ppo=True with algorithm.adv_estimator={estimator}: resampling is defined for gae only"
        )


def _check_gdpo(values: Mapping[str, Any]) -> None:
    keys, weights = values["algorithm.gdpo_reward_keys"], values["algorithm.gdpo_reward_weights"]
    if not keys:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: the values of your scorer that are rewards "
            "of their own, such as '[acc,format]'"
        )
    if len(set(keys)) < len(keys):
        raise ConfigError(f"algorithm.gdpo_reward_keys={keys} names a value twice; name each once")
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights={weights} holds {len(weights)} numbers for {len(keys)} "
            f"algorithm.gdpo_reward_keys={keys}; give one for each"
        )
    if values["algorithm.use_kl_in_reward"]:
        raise ConfigError(
            "algorithm.use_kl_in_reward=True with algorithm.adv_estimator=gdpo: it compares the values of "
            f"algorithm.gdpo_reward_keys, which hold no KL; set {_ACTOR}.use_kl_loss=True instead"
        )
    if not all(math.isfinite(weight) for weight in weights or ()):
        raise ConfigError(f"algorithm.gdpo_reward_weights={weights}: must be finite numbers")


def _check_kl_control(values: Mapping[str, Any]) -> None:
    if not values["algorithm.use_kl_in_reward"] or values["algorithm.kl_ctrl.type"] != "adaptive":
        return
    horizon, samples = values["algorithm.kl_ctrl.horizon"], values["data.train_batch_size"] * values[_N]
    if samples >= 5 * horizon:
        raise ConfigError(
            f"algorithm.kl_ctrl.horizon={horizon} is too short for {samples} samples an iteration: one step could turn "
            f"the coefficient negative; it has to exceed a fifth of them, so set {samples // 5 + 1} or more"
        )


def _check_loss(values: Mapping[str, Any]) -> None:
    mode, bypass = names.loss(values[f"{_LOSS}.loss_mode"]), values[f"{_CORRECTION}.bypass_mode"]
    given = f"{_LOSS}.loss_mode={values[f'{_LOSS}.loss_mode']}"
    if bypass and mode not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"{given} with {_CORRECTION}.bypass_mode=True: the bypass brings its own loss, chosen by "
            f"{_CORRECTION}.loss_type; leave out one of them"
        )
    if mode == "bypass_mode" and not bypass:
        raise ConfigError(f"{given} is the loss of {_CORRECTION}.bypass_mode=True; set that instead")
    if mode == "dro" and values[f"{_LOSS}.dro_beta"] is None:
        raise ConfigError(f"{given} needs {_LOSS}.dro_beta, a number above 0")
    low, high = values[f"{_LOSS}.clip_cov_lb"], values[f"{_LOSS}.clip_cov_ub"]
    if not low < high:
        raise ConfigError(f"{_LOSS}.clip_cov_lb={low} and clip_cov_ub={high}: the lower bound has to be the smaller")


def _check_correction(values: Mapping[str, Any]) -> None:
    if values[f"{_CORRECTION}.rollout_rs"] and values[f"{_CORRECTION}.rollout_rs_threshold"] is None:
        raise ConfigError(
            f"{_CORRECTION}.rollout_rs={values[f'{_CORRECTION}.rollout_rs']} needs {_CORRECTION}.rollout_rs_threshold: "
            "a band such as 0.5_2 for k1, a maximum for k2 and k3"
        )
