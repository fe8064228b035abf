"""From the typed configuration to the Plan: every number the run uses, computed once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from corral.config.engines import actor_engine, critic_engine, ref_engine
from corral.config.paths import local_path
from corral.config.plan import (
    ActorUpdate,
    AlgorithmPlan,
    CriticUpdate,
    DataPlan,
    EnginePlan,
    KLControl,
    Plan,
    RewardPlan,
    RolloutPlan,
    Sampling,
    SkipPlan,
    Topology,
    TrainerPlan,
)
from corral.config.schema.data import Data
from corral.config.schema.reward import Reward
from corral.config.schema.rollout import Rollout, ValKwargs
from corral.config.schema.root import Config
from corral.config.schema.trainer import Trainer
from corral.config.topology import topology
from corral.config.validate import listed
from corral.errors import ConfigError
from corral.platform import detect

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_NORM = "seq-mean-token-sum-norm"
_PROBE_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.2}
"""Log-prob gap that rounding alone explains, by compute dtype."""


def derive(config: Config, environ: Mapping[str, str]) -> Plan:
    """The plan of a configuration whose single values have been checked; `unused` is filled in by the caller.

    Raises ConfigError for combinations that cannot run.
    """
    device = detect().device if config.trainer.device == "auto" else config.trainer.device
    where, notices = topology(config.trainer, device, environ)
    actor = actor_engine(config, where)
    critic = critic_engine(config, where) if _needs_critic(config) else None
    rollout = _rollout(config, where, actor, notices)
    return Plan(
        topology=where,
        data=_data(config.data),
        actor=actor,
        actor_update=_actor_update(config),
        critic=critic,
        critic_update=_critic_update(config) if critic else None,
        ref=ref_engine(config, where) if _needs_ref(config) else None,
        rollout=rollout,
        skip=_skip(config, rollout),
        reward=_reward(config.reward),
        algorithm=_algorithm(config),
        trainer=_trainer(config, environ),
        notices=tuple(notices),
    )


def _needs_critic(config: Config) -> bool:
    enable = config.critic.enable
    return config.algorithm.adv_estimator == "gae" if enable is None else enable


def _needs_ref(config: Config) -> bool:
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def _data(data: Data) -> DataPlan:
    return DataPlan(
        train_files=tuple(local_path(file) for file in listed(data.train_files)),
        val_files=tuple(local_path(file) for file in listed(data.val_files)),
        prompt_key=data.prompt_key,
        train_batch_size=data.train_batch_size,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        shuffle=data.shuffle,
        seed=data.seed,
        train_max_samples=data.train_max_samples,
        val_max_samples=data.val_max_samples,
        apply_chat_template_kwargs=dict(data.apply_chat_template_kwargs),
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


def _actor_update(config: Config) -> ActorUpdate:
    actor, data = config.actor_rollout_ref.actor, config.data
    return ActorUpdate(
        mini_batch_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        shuffle_seed=actor.data_loader_seed,
        loss_mode=actor.policy_loss.loss_mode,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=_loss_scale(actor.loss_agg_mode, actor.loss_scale_factor, data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        calculate_entropy=actor.calculate_entropy,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        optimizer_steps=_optimizer_steps(_ACTOR, actor.ppo_mini_batch_size, actor.ppo_epochs, data.train_batch_size),
    )


def _critic_update(config: Config) -> CriticUpdate:
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


def _rollout(config: Config, where: Topology, actor: EnginePlan, notices: list[str]) -> RolloutPlan:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    name = _engine_name(rollout, where, notices)
    tp = rollout.tensor_model_parallel_size
    if where.world % tp:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={tp} does not divide the world of {where.world} ranks"
        )
    if tp > 1:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={tp} needs the vllm engine and native runs here; set it to 1"
        )
    tolerance = rollout.probe_tolerance
    return RolloutPlan(
        name=name,
        requested=rollout.name or "native",
        replicas=where.world // tp,
        tensor_model_parallel_size=tp,
        prompt_length=data.max_prompt_length,
        response_length=data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
        sampling=_sampling(rollout),
        val_sampling=_sampling(rollout.val_kwargs),
        probe_tolerance=_PROBE_TOLERANCE[actor.compute_dtype] if tolerance is None else tolerance,
    )


def _engine_name(rollout: Rollout, where: Topology, notices: list[str]) -> str:
    """What generates: native, the only engine of this version; falling back to it is said once."""
    if rollout.name in (None, "native"):
        return "native"
    if where.device != "cpu" and rollout.fallback != "native":
        raise ConfigError(
            f"{_ROLLOUT}.name={rollout.name} on {where.device}: this version has no {rollout.name} engine; set "
            f"{_ROLLOUT}.fallback=native to generate with the native engine, or {_ROLLOUT}.name=native"
        )
    notices.append(f"{_ROLLOUT}.name={rollout.name} is not available here: the native engine generates instead")
    return "native"


def _sampling(section: Rollout | ValKwargs) -> Sampling:
    return Sampling(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        do_sample=section.do_sample,
        n=section.n,
    )


def _skip(config: Config, rollout: RolloutPlan) -> SkipPlan:
    skip, trainer, data = config.skip.rollout, config.trainer, config.data
    experiment = f"{trainer.experiment_name}_{trainer.project_name}"
    sizes = f"GBS{data.train_batch_size}_N{rollout.sampling.n}_in{data.max_prompt_length}_out{data.max_response_length}"
    return SkipPlan(
        enable=skip.enable,
        dump_dir=str(Path(local_path(skip.dump_dir)) / experiment / sizes),
        steps=tuple(skip.steps),
        action=skip.action,
    )


def _reward(reward: Reward) -> RewardPlan:
    custom = reward.custom_reward_function
    return RewardPlan(
        custom_path=_function_source(custom.path),
        custom_name=custom.name,
        reward_kwargs=dict(custom.reward_kwargs),
        num_workers=min(8, os.cpu_count() or 1) if reward.num_workers is None else reward.num_workers,
        timeout=reward.timeout,
    )


def _function_source(path: str | None) -> str | None:
    """A file as an absolute path, a module as its dotted name."""
    if path is None or (
        all(part.isidentifier() for part in path.removesuffix(".py").split(".")) and not path.endswith(".py")
    ):
        return path
    file = local_path(path)
    if not os.path.isfile(file):
        raise ConfigError(f"reward.custom_reward_function.path={path} is neither a file ({file}) nor a module name")
    return file


def _algorithm(config: Config) -> AlgorithmPlan:
    algorithm = config.algorithm
    return AlgorithmPlan(
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        use_kl_in_reward=algorithm.use_kl_in_reward,
        kl_penalty=algorithm.kl_penalty,
        kl_ctrl=KLControl("fixed", algorithm.kl_ctrl.kl_coef, 10000, 0.1),
    )


def _trainer(config: Config, environ: Mapping[str, str]) -> TrainerPlan:
    trainer: Trainer = config.trainer
    folder = local_path(trainer.default_local_dir)
    records = environ.get("CORRAL_RUN_DIR")
    before = trainer.val_before_train
    return TrainerPlan(
        project_name=trainer.project_name,
        experiment_name=trainer.experiment_name,
        run_dir=local_path(records) if records else folder,
        checkpoint_dir=folder,
        logger=listed(trainer.logger),
        total_epochs=trainer.total_epochs,
        total_training_steps=trainer.total_training_steps,
        critic_warmup=trainer.critic_warmup,
        balance_batch=trainer.balance_batch,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        val_before_train=trainer.test_freq > 0 if before is None else before,
        val_only=trainer.val_only,
        val_cost_rows=trainer.val_cost_rows,
        rollout_data_dir=local_path(trainer.rollout_data_dir) if trainer.rollout_data_dir else None,
        cluster_wait=trainer.cluster_wait,
    )
