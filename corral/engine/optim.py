"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from corral.config.plan import Optimizer
from corral.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


def adamw(parameters: Iterable[nn.Parameter], plan: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with weight decay on all parameters, as torch does by default."""
    return torch.optim.AdamW(list(parameters), lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay, fused=True)


def warmup_steps(plan: Optimizer, horizon: int) -> int:
    """Iterations of warm-up: the count, or the ratio of the horizon when the count is negative."""
    return plan.lr_warmup_steps if plan.lr_warmup_steps >= 0 else int(plan.lr_warmup_steps_ratio * horizon)


def learning_rate(plan: Optimizer, iteration: int, horizon: int) -> float:
    """The rate used in `iteration` (from 0) of `horizon`.

    Warm-up rises to lr in equal steps and starts at lr / warm-up, never at zero. Then constant; or linear or cosine
    (num_cycles half-turns ×2) from lr down to min_lr_ratio · lr, which would be reached at the horizon.
    """
    warmup = warmup_steps(plan, horizon)
    if iteration < warmup:
        return plan.lr * (iteration + 1) / warmup
    progress = min(1.0, (iteration - warmup) / max(1, horizon - warmup))
    if plan.lr_scheduler_type == "constant":
        left = 1.0
    elif plan.lr_scheduler_type == "linear":
        left = 1.0 - progress
    elif plan.lr_scheduler_type == "cosine":
        left = max(0.0, 0.5 * (1.0 + math.cos(math.pi * 2.0 * plan.num_cycles * progress)))
    else:
        raise ConfigError(f"lr_scheduler_type={plan.lr_scheduler_type!r} is not one of {', '.join(SCHEDULES)}")
    return plan.lr * (plan.min_lr_ratio + (1.0 - plan.min_lr_ratio) * left)
