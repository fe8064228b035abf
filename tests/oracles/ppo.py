"""PPO's formulas token by token, in plain Python floats. Slow and literal on purpose; shares no code with Corral.

A row is one sample: a list with one entry per response token. `mask` entries are booleans.
"""

from __future__ import annotations

import math

Row = list[float]
Mask = list[bool]


def whiten(rows: list[Row], masks: list[Mask]) -> list[Row]:
    valid = [x for row, mask in zip(rows, masks, strict=True) for x, keep in zip(row, mask, strict=True) if keep]
    if len(valid) <= 1:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(valid) / len(valid)
    variance = math.fsum((x - mean) ** 2 for x in valid) / (len(valid) - 1)
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if keep else 0.0 for x, keep in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]


def gae(
    rewards: list[Row], values: list[Row], masks: list[Mask], gamma: float, lam: float
) -> tuple[list[Row], list[Row]]:
    """(advantages before whitening, returns), zero at masked tokens."""
    all_advantages, all_returns = [], []
    for reward, value, mask in zip(rewards, values, masks, strict=True):
        advantages, returns = [0.0] * len(reward), [0.0] * len(reward)
        next_value = next_advantage = waiting_reward = 0.0
        for t in reversed(range(len(reward))):
            if not mask[t]:
                waiting_reward += reward[t]
                continue
            delta = reward[t] + waiting_reward + gamma * next_value - value[t]
            advantages[t] = delta + gamma * lam * next_advantage
            returns[t] = advantages[t] + value[t]
            next_value, next_advantage, waiting_reward = value[t], advantages[t], 0.0
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def policy_token(
    log_prob: float, old_log_prob: float, advantage: float, low: float, high: float, c: float
) -> tuple[float, float, float, float]:
    """(loss, clipped, clipped_lower, kl) of one valid token, by cases."""
    log_ratio = log_prob - old_log_prob
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = lower = 0.0
    effective = ratio
    if advantage > 0 and ratio > 1 + high:
        effective, clipped = 1 + high, 1.0
    if advantage < 0 and ratio < 1 - low:
        effective, clipped = 1 - low, 1.0
    if advantage < 0 and effective > c:
        effective, lower = c, 1.0
    return -advantage * effective, clipped, lower, -log_ratio


def value_token(value: float, old_value: float, target: float, clip: float) -> tuple[float, float]:
    """(loss, clipped) of one valid token."""
    free = 0.5 * (value - target) ** 2
    near_value = value
    if value > old_value + clip:
        near_value = old_value + clip
    if value < old_value - clip:
        near_value = old_value - clip
    near = 0.5 * (near_value - target) ** 2
    return (near, 1.0) if near > free else (free, 0.0)


def kl_token(log_prob: float, ref_log_prob: float, kind: str) -> float:
    difference = log_prob - ref_log_prob
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return abs(difference)
    if kind in ("k2", "mse"):
        return 0.5 * difference * difference
    assert kind in ("k3", "low_var_kl")
    u = min(max(-difference, -20.0), 20.0)
    return min(math.exp(u) - u - 1, 10.0)


def aggregate(mode: str, rows: list[Row], masks: list[Mask], tokens: int, samples: int, scale: float) -> float:
    """One number from the losses per token; tokens and samples are those of the whole mini-batch."""
    sums = [sum(x for x, keep in zip(row, mask, strict=True) if keep) for row, mask in zip(rows, masks, strict=True)]
    lengths = [sum(mask) for mask in masks]
    if tokens == 0:
        return 0.0
    if mode == "token-mean":
        return sum(sums) / tokens
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-sum":
        return sum(sums) / samples
    if mode == "seq-mean-token-sum-norm":
        return sum(sums) / samples / scale
    assert mode == "seq-mean-token-mean"
    return sum(s / n for s, n in zip(sums, lengths, strict=True) if n) / samples
