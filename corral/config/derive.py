"""From the typed configuration to the Plan: every number the run uses, computed once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from corral.config.engines import actor_engine, critic_engine, ref_engine
from corral.config.generation import rollout_plan
from corral.config.objective import actor_update, algorithm_plan, critic_update, needs_critic
from corral.config.paths import local_path
from corral.config.plan import (
    DataPlan,
    Plan,
    RewardPlan,
    RolloutPlan,
    SkipPlan,
    TrainerPlan,
)
from corral.config.schema.data import Data
from corral.config.schema.reward import Reward
from corral.config.schema.root import Config
from corral.config.schema.trainer import Trainer
from corral.config.topology import topology
from corral.config.validate import listed
from corral.errors import ConfigError
from corral.platform import detect


def derive(config: Config, environ: Mapping[str, str]) -> Plan:
    """The plan of a configuration whose single values have been checked; `unused` is filled in by the caller.

    Raises ConfigError for combinations that cannot run.
    """
    device = detect().device if config.trainer.device == "auto" else config.trainer.device
    where, notices = topology(config.trainer, device, environ)
    actor = actor_engine(config, where)
    critic = critic_engine(config, where) if needs_critic(config) else None
    rollout = rollout_plan(config.actor_rollout_ref.rollout, config.data, where, actor, notices, environ)
    return Plan(
        topology=where,
        data=_data(config.data),
        actor=actor,
        actor_update=actor_update(config),
        critic=critic,
        critic_update=critic_update(config) if critic else None,
        ref=ref_engine(config, where) if _needs_ref(config) else None,
        rollout=rollout,
        skip=_skip(config, rollout),
        reward=_reward(config.reward),
        algorithm=algorithm_plan(config),
        trainer=_trainer(config, environ, has_critic=critic is not None),
        notices=tuple(notices),
    )


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


def _trainer(config: Config, environ: Mapping[str, str], *, has_critic: bool) -> TrainerPlan:
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
        critic_warmup=trainer.critic_warmup if has_critic else 0,
        balance_batch=trainer.balance_batch,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        val_before_train=trainer.test_freq > 0 if before is None else before,
        val_only=trainer.val_only,
        val_cost_rows=trainer.val_cost_rows,
        rollout_data_dir=local_path(trainer.rollout_data_dir) if trainer.rollout_data_dir else None,
        cluster_wait=trainer.cluster_wait,
        record_phases=trainer.record_phases,
        full_determinism=trainer.full_determinism,
        collective_check=trainer.collective_check,
        save_contents=tuple(config.actor_rollout_ref.actor.checkpoint.save_contents),
        resume_mode=trainer.resume_mode,
        resume_from_path=local_path(trainer.resume_from_path) if trainer.resume_from_path else None,
        max_actor_ckpt_to_keep=trainer.max_actor_ckpt_to_keep,
        max_critic_ckpt_to_keep=trainer.max_critic_ckpt_to_keep,
    )
