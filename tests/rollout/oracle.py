"""Slow and plain generation: a full forward for every token, one sample at a time, probabilities as Python numbers."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from corral.config.plan import Sampling

ORACLE_ATTENTION = "oracle"


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """transformers' eager attention without its float32 softmax, which would blur a float64 comparison."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    length = query.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(future, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(ORACLE_ATTENTION, _plain_attention)


def stream(seed: int, step: int, row: int, sample_index: int, count: int) -> list[float]:
    data = hashlib.shake_256(struct.pack("<4q", seed, step, row, sample_index)).digest(8 * count)
    return [(int.from_bytes(data[8 * i : 8 * i + 8], "little") >> 11) / 2**53 for i in range(count)]


@torch.no_grad()
def next_log_probs(model: nn.Module, ids: list[int], temperature: float) -> list[float]:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().tolist()
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = math.fsum(math.exp(x - top) for x in scaled)
    return [x - top - math.log(total) for x in scaled]


def candidates(log_probs: list[float], sampling: Sampling) -> dict[int, float]:
    """token -> probability of what top_k and then top_p leave, in vocabulary order."""
    ranked = sorted(range(len(log_probs)), key=lambda token: (-log_probs[token], token))
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    mass = math.fsum(math.exp(log_probs[token]) for token in ranked)
    kept, before = [], 0.0
    for token in ranked:
        if kept and sampling.top_p < 1 and before >= sampling.top_p * mass:
            break
        kept.append(token)
        before += math.exp(log_probs[token])
    return {token: math.exp(log_probs[token]) for token in sorted(kept)}


def pick(log_probs: list[float], uniform: float, sampling: Sampling) -> int:
    weights = candidates(log_probs, sampling)
    target, reached = uniform * math.fsum(weights.values()), 0.0
    for token, weight in weights.items():
        reached += weight
        if reached > target:
            return token
    return max(weights)


def generate(
    model: nn.Module, prompt: list[int], uniform: list[float], sampling: Sampling, stops: set[int]
) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and finish reason of one sample of at most len(uniform) tokens."""
    greedy = not sampling.do_sample or sampling.temperature == 0
    tokens: list[int] = []
    recorded: list[float] = []
    for number in uniform:
        log_probs = next_log_probs(model, prompt + tokens, sampling.temperature or 1.0)
        token = log_probs.index(max(log_probs)) if greedy else pick(log_probs, number, sampling)
        tokens.append(token)
        recorded.append(log_probs[token])
        if token in stops:
            return tokens, recorded, "stop"
    return tokens, recorded, "length"


def score(model: nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    return [next_log_probs(model, prompt + response[:i], temperature)[token] for i, token in enumerate(response)]
