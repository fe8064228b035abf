"""Checks of single values, before anything is derived from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from corral.config import names
from corral.config.combinations import check_combinations, check_functions
from corral.config.names import check_name
from corral.errors import ConfigError

Values = Mapping[str, Any]
"""Full dotted key → value, for every key of the schema."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"

CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "algorithm.kl_penalty": (names.KL_ESTIMATORS, ("full",)),
    "algorithm.kl_ctrl.type": (names.KL_CONTROLLERS, ()),
    "algorithm.pf_ppo.reweight_method": (names.REWEIGHT_METHODS, ()),
    "algorithm.rollout_correction.rollout_is": (names.CORRECTION_LEVELS, ()),
    "algorithm.rollout_correction.loss_type": (names.BYPASS_LOSSES, ()),
    f"{_ACTOR}.loss_agg_mode": (names.AGGREGATIONS, ()),
    f"{_ACTOR}.kl_loss_type": (names.KL_ESTIMATORS, ("full",)),
    f"{_ACTOR}.strategy": (names.STRATEGIES, names.STRATEGIES_LATER),
    f"{_ACTOR}.optim.lr_scheduler_type": (names.SCHEDULES, ()),
    "critic.loss_agg_mode": (names.AGGREGATIONS, ()),
    "critic.strategy": (names.STRATEGIES, names.STRATEGIES_LATER),
    "critic.optim.lr_scheduler_type": (names.SCHEDULES, ()),
    f"{_ROLLOUT}.name": (names.ENGINES, names.ENGINES_LATER),
    f"{_ROLLOUT}.fallback": (("native",), ()),
    "data.truncation": (names.TRUNCATIONS, ()),
    "reward.reward_manager.name": (("naive",), ("dapo", "gdpo", "rate_limited", "remote")),
    "trainer.device": (names.DEVICES, ()),
    "trainer.resume_mode": (names.RESUME_MODES, ()),
    "trainer.record_phases": (names.PHASE_RECORDS, ()),
    "skip.rollout.action": (names.SKIP_ACTIONS, ("random", "empty")),
}
"""Key → (names this version has, names of the same family that it does not have)."""

_AT_LEAST_ONE = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
    "algorithm.kl_ctrl.horizon",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.ppo_epochs",
    f"{_REF}.ulysses_sequence_parallel_size",
    f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_max_token_len_per_gpu",
    f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.val_kwargs.n",
    f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.max_model_len",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size",
    "critic.ppo_epochs",
    "reward.num_workers",
)
_ABOVE_ZERO = (
    "algorithm.kl_ctrl.target_kl",
    f"{_ACTOR}.tau_pos",
    f"{_ACTOR}.tau_neg",
    f"{_ACTOR}.policy_loss.dro_beta",
    f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.optim.num_cycles",
    f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.loss_scale_factor",
    "critic.optim.lr",
    "critic.optim.clip_grad",
    "critic.optim.num_cycles",
    "critic.cliprange_value",
    "critic.loss_scale_factor",
    f"{_ROLLOUT}.temperature",
    f"{_ROLLOUT}.probe_tolerance",
    f"{_ROLLOUT}.gpu_memory_utilization",
    "reward.timeout",
    "trainer.cluster_wait",
)
_RANGES: dict[str, tuple[float, float]] = {
    "algorithm.gamma": (0, 1),
    "algorithm.lam": (0, 1),
    "algorithm.kl_ctrl.kl_coef": (0, math.inf),
    "algorithm.pf_ppo.weight_pow": (0, math.inf),
    "algorithm.filter_groups.max_num_gen_batches": (0, math.inf),
    f"{_ACTOR}.clip_ratio_low": (0, 1),
    f"{_ACTOR}.policy_loss.clip_cov_ratio": (0, 1),
    f"{_ACTOR}.policy_loss.clip_cov_lb": (-math.inf, math.inf),
    f"{_ACTOR}.policy_loss.clip_cov_ub": (-math.inf, math.inf),
    f"{_ACTOR}.policy_loss.kl_cov_ratio": (0, 1),
    f"{_ACTOR}.policy_loss.ppo_kl_coef": (0, math.inf),
    f"{_ACTOR}.entropy_coeff": (-math.inf, math.inf),
    f"{_ACTOR}.kl_loss_coef": (0, math.inf),
    f"{_ROLLOUT}.val_kwargs.temperature": (0, math.inf),
    f"{_ROLLOUT}.gpu_memory_utilization": (0, 1),
    "trainer.critic_warmup": (0, math.inf),
    "trainer.save_freq": (-1, math.inf),
    "trainer.test_freq": (-1, math.inf),
    "trainer.val_cost_rows": (0, math.inf),
    **{f"{role}.optim.weight_decay": (0, math.inf) for role in (_ACTOR, "critic")},
    **{f"{role}.optim.lr_warmup_steps": (-1, math.inf) for role in (_ACTOR, "critic")},
    **{f"{role}.optim.lr_warmup_steps_ratio": (0, 1) for role in (_ACTOR, "critic")},
    **{f"{role}.optim.min_lr_ratio": (0, 1) for role in (_ACTOR, "critic")},
}


def check_values(values: Values) -> None:
    """Raise ConfigError for the first name, number or flag that cannot run whatever the others are."""
    for key, (known, later) in CHOICES.items():
        if values[key] is not None:
            check_name(key, values[key], known, later)
    for logger in listed(values["trainer.logger"]):
        check_name("trainer.logger", logger, names.LOGGERS, names.LOGGERS_LATER)
    check_functions(values)
    _check_numbers(values)
    check_combinations(values)
    _check_sampling(values)
    _check_models(values)
    _check_unavailable(values)
    _check_checkpoints(values)
    _check_skip(values)


def listed(value: Any) -> tuple[str, ...]:
    """A key that takes one name or a list of names, as a tuple."""
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def _check_numbers(values: Values) -> None:
    for key in _AT_LEAST_ONE:
        if values[key] is not None and values[key] < 1:
            raise ConfigError(f"{key}={values[key]}: must be at least 1")
    for key in _ABOVE_ZERO:
        if values[key] is not None and not 0 < values[key] < math.inf:
            raise ConfigError(f"{key}={values[key]}: must be a finite number above 0")
    for key, (low, high) in _RANGES.items():
        if not low <= values[key] <= high or math.isinf(values[key]):
            bounds = f"between {low:g} and {high:g}" if high < math.inf else f"a finite number, at least {low:g}"
            raise ConfigError(f"{key}={values[key]}: must be {bounds}")
    for key in ("data.train_max_samples", "data.val_max_samples"):
        if values[key] != -1 and values[key] < 1:
            raise ConfigError(f"{key}={values[key]}: must be -1 (all rows) or at least 1")
    if not 1 < values[f"{_ACTOR}.clip_ratio_c"] < math.inf:
        raise ConfigError(f"{_ACTOR}.clip_ratio_c={values[f'{_ACTOR}.clip_ratio_c']}: the dual clip must be above 1")
    for role in (_ACTOR, "critic"):
        betas = values[f"{role}.optim.betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{role}.optim.betas={betas}: must be two numbers of [0, 1), such as [0.9,0.999]")


def _check_sampling(values: Values) -> None:
    for block in (_ROLLOUT, f"{_ROLLOUT}.val_kwargs"):
        top_k, top_p = values[f"{block}.top_k"], values[f"{block}.top_p"]
        if top_k != -1 and top_k < 1:
            raise ConfigError(f"{block}.top_k={top_k}: must be -1 (all tokens) or at least 1")
        if not 0 < top_p <= 1:
            raise ConfigError(f"{block}.top_p={top_p}: must be above 0 and at most 1")
    val = f"{_ROLLOUT}.val_kwargs"
    if values[f"{val}.do_sample"] and values[f"{val}.temperature"] == 0:
        raise ConfigError(f"{val}.do_sample=True with {val}.temperature=0 cannot sample; set a temperature above 0")
    if values[f"{val}.n"] > 1 and not values[f"{val}.do_sample"]:
        raise ConfigError(
            f"{val}.n={values[f'{val}.n']} with {val}.do_sample=False gives equal samples; set n=1 or do_sample=True"
        )


def _check_models(values: Values) -> None:
    for block in ("actor_rollout_ref.model", "critic.model"):
        if not values[f"{block}.use_remove_padding"]:
            raise ConfigError(
                f"{block}.use_remove_padding=False is not available: rows are always packed; set it to True"
            )
        if not values[f"{block}.path"]:
            raise ConfigError(f"{block}.path is not set; give the folder of a causal language model")


def _check_unavailable(values: Values) -> None:
    for block in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp"):
        size = values[f"{block}.fsdp_size"]
        if size != -1:
            raise ConfigError(f"{block}.fsdp_size={size} is not available; only -1 (shard over all ranks) is")


def _check_checkpoints(values: Values) -> None:
    key = f"{_ACTOR}.checkpoint.save_contents"
    for name in values[key]:
        check_name(key, name, names.SAVE_CONTENTS)
    if values["trainer.save_freq"] > 0 and not values[key]:
        raise ConfigError(
            f"{key}=[] with trainer.save_freq={values['trainer.save_freq']} saves nothing; name some of "
            f"{', '.join(names.SAVE_CONTENTS)}, or set trainer.save_freq=-1"
        )
    if values["trainer.resume_mode"] == "resume_path" and not values["trainer.resume_from_path"]:
        raise ConfigError(
            "trainer.resume_mode=resume_path without trainer.resume_from_path; give the folder global_step_N of a "
            "checkpoint"
        )


def _check_skip(values: Values) -> None:
    steps, horizon = values["skip.rollout.steps"], values["trainer.total_training_steps"]
    if any(step < 1 for step in steps):
        raise ConfigError(f"skip.rollout.steps={steps}: steps count from 1")
    if values["skip.rollout.enable"] and horizon is not None and any(step > horizon for step in steps):
        raise ConfigError(
            f"skip.rollout.steps={steps}: the run ends at step {horizon} (trainer.total_training_steps); "
            "drop the later steps or raise it"
        )
