"""A run of four steps that changes everything a checkpoint has to keep, and comparisons of what such runs left."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.trainer.runs import Inputs, metrics

STEPS = 4
# Wall-clock and memory.
IGNORED = ("timing", "perf/", "actor/perf/")
FILES = ("model.safetensors", "optimizer.safetensors")
ACTOR = "actor_rollout_ref.actor"


def resumable(inputs: Inputs, run_dir: Path, *more: str, dtype: str = "float64") -> list[str]:
    """Two steps an epoch, learning rates with warm-up and cosine, an adaptive KL coefficient, shuffled mini-batches; a
    checkpoint every step."""
    engines = (f"{ACTOR}.fsdp_config", "critic.fsdp")
    return inputs.overrides(
        run_dir,
        "data.train_max_samples=17",
        "data.max_response_length=12",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.kl_coef=0.1",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
        *(f"{role}.optim.lr=1e-3" for role in (ACTOR, "critic")),
        *(f"{role}.optim.lr_warmup_steps=2" for role in (ACTOR, "critic")),
        *(f"{role}.optim.lr_scheduler_type=cosine" for role in (ACTOR, "critic")),
        *(f"{engine}.{key}={dtype}" for engine in engines for key in ("model_dtype", "dtype")),
        "reward.num_workers=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        *more,
    )


def from_path(folder: Path) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step → metrics without clocks."""
    return {
        int(step["step"]): {name: value for name, value in step.items() if not name.startswith(IGNORED)}
        for step in metrics(run_dir)
    }


def state(run_dir: Path, step: int) -> dict[str, object]:
    """trainer.json of a checkpoint."""
    out: dict[str, object] = json.loads((run_dir / f"global_step_{step}" / "trainer.json").read_text())
    return out


def assert_same_checkpoint(one: Path, other: Path, step: int, *, atol: float = 0.0) -> None:
    """The same trainer.json, positions, weights and moments, to `atol`."""
    here, there = state(one, step), state(other, step)
    assert abs(here.pop("kl_coefficient") - there.pop("kl_coefficient")) <= atol  # type: ignore[operator]
    assert here == there
    for role in ("actor", "critic"):
        a, b = (run / f"global_step_{step}" / role for run in (one, other))
        assert (a / "extra.json").read_text() == (b / "extra.json").read_text()
        for file in FILES:
            ours, theirs = load_file(a / file), load_file(b / file)
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert torch.allclose(ours[name], theirs[name], rtol=0, atol=atol), f"{role}: {name}"
