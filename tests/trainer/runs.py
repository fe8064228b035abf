"""Runs of the trainer for tests: in this process, or as the command users type; and what they left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from corral.exits import run_command
from corral.trainer.main_ppo import main

REWARDS = Path(__file__).parent


@dataclass(frozen=True)
class Inputs:
    model: Path
    data: Path

    def overrides(self, run_dir: Path, *more: str) -> list[str]:
        """A one-step run of 8 prompts in two mini-batches; `more` comes last and so wins."""
        return [
            f"data.train_files={self.data}/train.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=256",
            "data.max_response_length=24",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
            f"reward.custom_reward_function.path={REWARDS}/varied_reward.py",
            "trainer.n_gpus_per_node=1",
            "trainer.nnodes=1",
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={run_dir}",
            f"trainer.rollout_data_dir={run_dir}/samples",
            *more,
        ]


def train(
    overrides: Sequence[str], environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m corral.trainer.main_ppo` to its end; a package `corral` in cwd comes before the installed one."""
    env = {**os.environ, **(environ or {})}
    return subprocess.run(command(overrides), env=env, cwd=cwd, capture_output=True, text=True, timeout=600)


def command(overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "corral.trainer.main_ppo", *overrides]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """One dictionary a step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What the step was trained on."""
    return [json.loads(line) for line in (run_dir / "samples" / f"{step}.jsonl").read_text().splitlines()]


def weights(run_dir: Path, step: int, role: str) -> dict[str, Tensor]:
    """The exported weights of one role."""
    return load_file(run_dir / f"global_step_{step}" / role / "huggingface" / "model.safetensors")


def train_here(overrides: Sequence[str]) -> int:
    """The same command inside this process, where nothing has to be imported again; its exit code."""
    return run_command(lambda: main(overrides))


def temporary_files(*folders: Path) -> list[Path]:
    """Files and folders that are written beside their final place; none may stay behind."""
    return [
        path for folder in folders for path in folder.rglob("*") if path.name.startswith(".") or ".tmp" in path.name
    ]


def error_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, stderr
    return lines[0]


def assert_whole(run_dir: Path) -> None:
    """What the run left can be read to its end."""
    metrics(run_dir)
    json.loads((run_dir / "plan.json").read_text())
    json.loads((run_dir / "trace.json").read_text())
    assert temporary_files(run_dir) == []
