"""What a user writes to add an estimator, a policy loss and a reward, each named by import path."""

from __future__ import annotations

from typing import Any

import torch


def three_quarters(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimator: the same advantage for every token, whatever the reward."""
    advantages = torch.where(batch.mask, 0.75, 0.0).to(batch.rewards.dtype)
    return advantages, advantages.clone()


def too_short(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.rewards[1:], batch.rewards[1:]


def likelihood(tokens: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A policy loss: −A · log π, and a statistic of its own."""
    log_probs = torch.where(tokens.mask, tokens.log_probs, 0)
    loss = -torch.where(tokens.mask, tokens.advantages, 0) * log_probs
    return loss, {"likelihood/mean": log_probs.detach()}


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return 0.25
