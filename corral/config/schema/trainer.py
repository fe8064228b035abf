"""trainer.*: where and how long."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.config.section import Section, key


@dataclass
class Trainer(Section):
    project_name: str = key("corral", "Project; part of the run folder.")
    experiment_name: str = key("run", "Experiment; part of the run folder.")
    nnodes: int = key(1, "Nodes.", "nodes")
    n_gpus_per_node: int = key(1, "Devices per node; on cpu logical devices, one process each.", "devices")
    device: str = key("auto", "auto, cpu, cuda or npu.")
    full_determinism: bool = key(
        False, "Deterministic kernels and collectives: the same run ends in the same bits. Slower on cuda and npu."
    )
    total_epochs: int = key(30, "Passes over the training set.")
    total_training_steps: int | None = key(None, "Iterations; null: as many as the epochs hold.", "steps")
    critic_warmup: int = key(0, "Iterations that update only the critic.", "steps")
    balance_batch: bool = key(True, "Spread the tokens of a mini-batch evenly over the DP ranks.")
    logger: Any = key(
        ["console", "file"], "console: one line a step. file names metrics.jsonl, which every run writes anyway."
    )
    save_freq: int = key(-1, "Iterations between checkpoints; -1: never. The last iteration is saved too.", "steps")
    test_freq: int = key(-1, "Iterations between validations; -1: never. The last iteration validates too.", "steps")
    val_before_train: bool | None = key(None, "Validate before the first iteration; null: when test_freq > 0.")
    val_only: bool = key(False, "Validate once and stop.")
    val_cost_rows: int = key(
        128, "On cpu, a validation set with more rows prints its estimated cost before it starts.", "rows"
    )
    resume_mode: str = key(
        "auto",
        "auto: go on from the newest checkpoint in default_local_dir, if there is one. resume_path: from "
        "resume_from_path. disable: start from the model folder.",
    )
    resume_from_path: str | None = key(None, "Folder global_step_N of a checkpoint, for resume_mode=resume_path.")
    max_actor_ckpt_to_keep: int | None = key(
        None, "Newest checkpoints whose actor stays on disk; null: all.", "checkpoints"
    )
    max_critic_ckpt_to_keep: int | None = key(
        None, "Newest checkpoints whose critic stays on disk; null: all.", "checkpoints"
    )
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Run folder: plan, configuration, metrics, traces, logs and checkpoints.",
    )
    rollout_data_dir: str | None = key(
        None, "Folder for one JSONL file of prompts, responses and scores per iteration."
    )
    record_phases: str = key(
        "none",
        "What each step leaves in phases/ of the run folder. none; summary: its samples, what was computed for them, "
        "norms of gradients and weights; full: the gradients and weights themselves too.",
    )
    collective_check: bool = key(
        True,
        "With more than one rank, before a model is loaded: check the collectives and measure every pair of ranks, and "
        "end with the name of what is wrong or slow. What was found is in collective.json of the run folder.",
    )
    cluster_wait: float = key(
        120.0, "How long to wait for the nodes and devices of a cluster that is joined.", "seconds"
    )
