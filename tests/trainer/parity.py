"""The parity check: the same training in one process and on 2 nodes × 4 ranks with sequence parallel 2."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from corral.e2e import parity_metrics
from tests.trainer.runs import Inputs, weights

STEPS = 3
LR = 1e-3
IGNORED = tuple(parity_metrics.IGNORED)


def parity_overrides(inputs: Inputs, run_dir: Path, *, split: bool, dtype: str) -> list[str]:
    """3 steps of 16 prompts × 2 samples at lr 1e-3; a packed row holds 192 tokens, so a rank runs several."""
    sp = 2 if split else 1
    topology = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"] if split else []
    engines = ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")
    return inputs.overrides(
        run_dir,
        "data.train_batch_size=16",
        "data.max_response_length=40",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={192 // sp}",
        f"critic.ppo_max_token_len_per_gpu={192 // sp}",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        f"critic.optim.lr={LR}",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={sp}",
        f"critic.ulysses_sequence_parallel_size={sp}",
        *(f"{engine}.{key}={dtype}" for engine in engines for key in ("model_dtype", "dtype")),
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        *topology,
    )


def other_exports(one: Path, many: Path, *, rtol: float, atol: float) -> list[str]:
    """Exported weights of the last step that are not equal.

    In float32 tensor by tensor (norm of the difference to rtol), and no element may be off by more than a fiftieth of
    one Adam step: where a gradient is all rounding, Adam makes a full step of its sign.
    """
    found = []
    for role in ("actor", "critic"):
        here, there = weights(one, STEPS, role), weights(many, STEPS, role)
        if here.keys() != there.keys():
            found.append(f"{role}: other weights")
            continue
        found += [f"{role}: {name} differs" for name in here if not _same_weight(here[name], there[name], rtol, atol)]
    return found


def _same_weight(here: Tensor, there: Tensor, rtol: float, atol: float) -> bool:
    if here.dtype == torch.float64:
        return torch.allclose(here, there, rtol=rtol, atol=atol)
    gap = here - there
    return bool(gap.norm() <= rtol * here.norm() and gap.abs().max() <= LR / 50)
