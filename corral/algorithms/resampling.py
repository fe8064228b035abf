"""Policy filtration (Zhang et al., 2024, arXiv:2409.06957): an update sees samples drawn by their scores."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

METHODS = ("pow", "max_min", "max_random")


def resample(scores: Tensor, votes: Tensor, method: str, weight_pow: float, seed: int, step: int) -> Tensor:
    """[S] int64: samples drawn with replacement, as many as there are, in the order they were drawn.

    scores [S]: of whole samples, finite where votes [S] bool; the others (padding, rejected) are never drawn, unless
    nobody votes: then the samples stay as they are. Depends on its arguments alone, seed and step keying the draw.
    Weights: see `weights`. Raises ValueError as it does.
    """
    voter = votes.nonzero().squeeze(1)
    if voter.numel() == 0:
        return torch.arange(scores.numel(), device=scores.device)
    upper = weights(scores[voter].double(), method, weight_pow).cumsum(0)
    uniform = _uniforms(seed, step, scores.numel()).to(scores.device)
    # right=True: a voter of weight 0 covers no interval. The last may round up to the end of the line, hence the clamp.
    drawn = torch.searchsorted(upper, uniform * upper[-1], right=True)
    last = torch.searchsorted(upper, upper[-1])  # the last voter with a weight
    return voter[drawn.clamp(max=last)]


def weights(scores: Tensor, method: str, weight_pow: float) -> Tensor:
    """[M], not normalised: pow (|s| / largest |s|)^weight_pow; max_min 1 for the highest and the lowest score, else 0;
    max_random 0.4 for the highest score, else 0.1. Uniform when all are zero.

    Raises ValueError for another method, or a negative power.
    """
    if method == "pow":
        if weight_pow < 0:
            raise ValueError(f"weight_pow={weight_pow} is negative: a score of 0 would have infinite weight")
        size = scores.abs()
        # Relative to the largest, so that no power overflows.
        return (size / size.max()) ** weight_pow if size.max() > 0 else torch.ones_like(scores)
    if method == "max_min":
        return ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    if method == "max_random":
        return torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    raise ValueError(f"unknown reweight method {method!r}: expected one of {METHODS}")


def _uniforms(seed: int, step: int, count: int) -> Tensor:
    """[count] float64 in [0, 1), keyed through SHAKE-256: the same on every device and with every version of torch."""
    key = b"pf_ppo" + struct.pack("<2q", seed, step)
    words = torch.frombuffer(bytearray(hashlib.shake_256(key).digest(8 * count)), dtype=torch.int64)
    # The upper 53 bits of each word; the mask undoes the sign that the shift carries down.
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
