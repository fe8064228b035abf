"""Drawing the next token: a random stream of its own for every sample, and inverse-CDF sampling in float64.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from corral.config.plan import Sampling

_WORK_ELEMENTS = 1 << 22
"""Rows × vocabulary handled at a time: a few float64 temporaries of 32 MiB, whatever the batch."""


def uniforms(seed: int, step: int, row: int, sample_index: int, count: int) -> Tensor:
    """[count] float64 in [0, 1): the random stream of one sample, one number for each response token (at least 1).

    Keyed by its four arguments alone through SHAKE-256, so the stream is the same in every process, on every device and
    with every version of torch, and a longer stream starts with the shorter one. (torch's CPU generator keeps 32 bits
    of its seed: samples of a long run would share streams.)
    """
    key = struct.pack("<4q", seed, step, row, sample_index)
    words = torch.frombuffer(bytearray(hashlib.shake_256(key).digest(8 * count)), dtype=torch.int64)
    # The upper 53 bits of each word; the mask undoes the sign that the shift carries down.
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-prob.

    logits [B, V]; uniform [B] float64 in [0, 1), one number per row (not looked at when greedy). Returns tokens [B]
    int64 and log_probs [B] float64. The log-prob is of the temperature-scaled distribution over the whole vocabulary,
    also under top_k and top_p and for greedy rows, because that is what the trainer recomputes; temperature 0, which
    only validation has, is recorded at 1.
    Logits with NaN give NaN log-probs.
    """
    rows = max(1, _WORK_ELEMENTS // logits.shape[-1])
    parts = [_draw(*part, sampling) for part in zip(torch.split(logits, rows), torch.split(uniform, rows), strict=True)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(logits.double() / (sampling.temperature or 1.0), dim=-1)
    if sampling.greedy:
        tokens = log_probs.argmax(dim=-1)
    else:
        tokens = _invert_cdf(_filtered(log_probs.exp(), sampling.top_k, sampling.top_p), uniform)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B] the token whose stretch of the cumulated [B, V] weights (of any positive total) holds the uniform number.

    Cumulated in vocabulary order, not by size: two nearly equal probabilities that change places by a rounding error
    would otherwise change the token.
    """
    cdf = probs.cumsum(dim=-1)
    # u ≤ 1 - 2^-53 takes at least half a unit in the last place off the total, so the product rounds to less than the
    # total and the token found has probability.
    target = uniform * cdf[:, -1]
    # NaN sorts after everything: keep the index inside the vocabulary, the log-prob will say NaN.
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def _filtered(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] probabilities with the tokens outside top_k and then outside top_p set to zero, not renormalised.

    top_p keeps the smallest set of most likely tokens (of those top_k left) that holds at least that share; the most
    likely token always stays. Equal probabilities: the lower token id counts as the more likely.
    """
    vocabulary = probs.shape[-1]
    kept = top_k if 0 < top_k < vocabulary else vocabulary
    if kept == vocabulary and top_p >= 1:
        return probs
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ordered, tokens = ordered[:, :kept], tokens[:, :kept]
    if top_p < 1:
        before = ordered.cumsum(dim=-1) - ordered
        outside = before >= top_p * ordered.sum(dim=-1, keepdim=True)
        outside[:, 0].fill_(False)  # an assignment would bring the value from the host
        ordered = ordered.masked_fill(outside, 0.0)
    return torch.zeros_like(probs).scatter(-1, tokens, ordered)
