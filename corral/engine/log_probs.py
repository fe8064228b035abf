"""Log-probabilities and entropies of tokens from logits, in at least single precision."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision values as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [n] of targets [n] under softmax(logits [n, V] / temperature), and its entropy [n] in nats.

    Both are differentiable. Float32, or float64 for float64 logits.
    """
    distribution = torch.log_softmax(at_least_float32(logits) / temperature, dim=-1)
    log_probs = distribution.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return log_probs, None
    return log_probs, -(distribution.exp() * distribution).sum(dim=-1)


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float, rows: int = 1024) -> Tensor:
    """Σ π² [n] of π = softmax(logits [n, V] / temperature): the chance that two draws are the same token.

    `rows` tokens at a time, so that it never holds a second matrix of the size of the logits. Float32, or float64
    for float64 logits.
    """
    parts = [
        torch.softmax(at_least_float32(part) / temperature, dim=-1).square().sum(dim=-1)
        for part in torch.split(logits, rows)
    ]
    return torch.cat(parts)
