"""Advantage estimators sample by sample and token by token, in plain Python floats, written from the formulas.

A row is one sample: a list with one entry per response token; `masks` entries are booleans; `groups` has one entry a
sample. Every function gives rows of (advantages, returns), zero at masked tokens. Shares no code with Corral.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.oracles.ppo import Mask, Row, gae, whiten

Rows = list[Row]
Result = tuple[Rows, Rows]


def credited(rewards: Rows, masks: list[Mask]) -> Rows:
    """Rewards of masked tokens moved to the last valid token before them; those without one are dropped."""
    out = []
    for reward, mask in zip(rewards, masks, strict=True):
        row, last = [0.0] * len(reward), None
        for t in range(len(reward)):
            if mask[t]:
                last = t
            if last is not None:
                row[last] += reward[t]
        out.append(row)
    return out


def scores_of(rewards: Rows, masks: list[Mask]) -> list[float | None]:
    """A sample's score; None for one that has no valid token and hence no vote."""
    return [math.fsum(row) if any(mask) else None for row, mask in zip(credited(rewards, masks), masks, strict=True)]


def mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


def std(xs: list[float]) -> float:
    center = mean(xs)
    return math.sqrt(math.fsum((x - center) ** 2 for x in xs) / (len(xs) - 1))


def per_sample(scores: list[float | None], groups: list[int], rule: Callable[[float, list[int]], float]) -> list[float]:
    """rule(score, members that vote: their sample numbers) of every voter; 0 for the others."""
    out = []
    for score, group in zip(scores, groups, strict=True):
        members = [j for j in range(len(scores)) if groups[j] == group and scores[j] is not None]
        out.append(0.0 if score is None else rule(score, members))
    return out


def broadcast(advantages: list[float], masks: list[Mask]) -> Rows:
    return [[a if keep else 0.0 for keep in mask] for a, mask in zip(advantages, masks, strict=True)]


def normalised(scores: list[float | None], groups: list[int], by_std: bool) -> list[float]:
    def rule(score: float, members: list[int]) -> float:
        voted = [scores[j] for j in members]
        if len(voted) == 1:
            return score
        deviation = score - mean(voted)
        return deviation / (std(voted) + 1e-6) if by_std else deviation

    return per_sample(scores, groups, rule)


def grpo(rewards: Rows, masks: list[Mask], groups: list[int], by_std: bool) -> Result:
    rows = broadcast(normalised(scores_of(rewards, masks), groups, by_std), masks)
    return rows, rows


def grpo_passk(rewards: Rows, masks: list[Mask], groups: list[int], by_std: bool) -> Result:
    scores = scores_of(rewards, masks)

    def rule(score: float, members: list[int]) -> float:
        voted = sorted(scores[j] for j in members)
        if len(voted) < 2 or score < voted[-1]:
            return 0.0
        lead = voted[-1] - voted[-2]  # 0 in a tie, whichever of the best is meant
        return lead / (std(voted) + 1e-6) if by_std else lead

    rows = broadcast(per_sample(scores, groups, rule), masks)
    return rows, rows


def gdpo(
    components: list[list[float]], weights: list[float], masks: list[Mask], groups: list[int], by_std: bool
) -> Result:
    total = [0.0] * len(masks)
    for k, weight in enumerate(weights):
        scores = [row[k] if any(mask) else None for row, mask in zip(components, masks, strict=True)]
        for i, advantage in enumerate(normalised(scores, groups, by_std)):
            total[i] += weight * advantage
    rows = whiten(broadcast(total, masks), masks)
    return rows, rows


def reinforce_plus_plus(rewards: Rows, masks: list[Mask], gamma: float) -> Result:
    all_returns = []
    for row, mask in zip(credited(rewards, masks), masks, strict=True):
        out, carried = [0.0] * len(row), 0.0
        for t in reversed(range(len(row))):
            if mask[t]:
                carried = row[t] + gamma * carried
                out[t] = carried
        all_returns.append(out)
    return whiten(all_returns, masks), all_returns


def reinforce_plus_plus_baseline(rewards: Rows, masks: list[Mask], groups: list[int]) -> Result:
    rows = whiten(broadcast(normalised(scores_of(rewards, masks), groups, by_std=False), masks), masks)
    return rows, rows


def rloo(rewards: Rows, masks: list[Mask], groups: list[int]) -> Result:
    scores = scores_of(rewards, masks)
    out = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in range(len(scores)) if j != i and groups[j] == groups[i] and scores[j] is not None]
        out.append(score - mean(others) if score is not None and others else 0.0)
    rows = broadcast(out, masks)
    return rows, rows


def opo(rewards: Rows, masks: list[Mask], groups: list[int]) -> Result:
    scores = scores_of(rewards, masks)

    def rule(score: float, members: list[int]) -> float:
        lengths = [sum(masks[j]) for j in members]
        weighted = math.fsum(n * scores[j] for n, j in zip(lengths, members, strict=True))
        return score - weighted / sum(lengths)

    rows = broadcast(per_sample(scores, groups, rule), masks)
    return rows, rows


def gpg(rewards: Rows, masks: list[Mask], groups: list[int]) -> Result:
    scores = scores_of(rewards, masks)
    voted = [score for score in scores if score is not None]
    alpha = len(voted) / max(sum(score != 0 for score in voted), 1)
    rule_scores = per_sample(
        scores, groups, lambda score, members: alpha * (score - mean([scores[j] for j in members]))
    )
    rows = broadcast(rule_scores, masks)
    return rows, rows


def to_go(rewards: Rows, masks: list[Mask]) -> Rows:
    """Σ of credited rewards from each valid token on."""
    return [
        [math.fsum(row[t:]) if mask[t] else 0.0 for t in range(len(row))]
        for row, mask in zip(credited(rewards, masks), masks, strict=True)
    ]


def remax(rewards: Rows, masks: list[Mask], baseline: list[float]) -> Result:
    returns = to_go(rewards, masks)
    advantages = [
        [g - b if keep else 0.0 for g, keep in zip(row, mask, strict=True)]
        for row, mask, b in zip(returns, masks, baseline, strict=True)
    ]
    return advantages, returns


def optimal_token_baseline(
    rewards: Rows,
    masks: list[Mask],
    groups: list[int],
    log_probs: Rows,
    sum_pi_squared: Rows,
    weights: Rows | None,
    skip_tools: bool,
) -> Result:
    """skip_tools: token times count valid tokens only (the tir form)."""
    returns = to_go(rewards, masks)
    at_time: list[dict[int, tuple[int, float]]] = []  # of each sample: time → (token, W)
    for i, mask in enumerate(masks):
        carried, seen = 0.0, {}
        for t in range(len(mask)):
            if mask[t]:
                norm = max(1 - 2 * math.exp(log_probs[i][t]) + sum_pi_squared[i][t], 0.0)
                carried += norm if weights is None else norm * weights[i][t] ** 2
                seen[len(seen) if skip_tools else t] = (t, carried)
        at_time.append(seen)
    advantages = [[0.0] * len(mask) for mask in masks]
    for i, seen in enumerate(at_time):
        for time, (t, _) in seen.items():
            others = [
                (returns[j][at_time[j][time][0]], at_time[j][time][1])
                for j in range(len(masks))
                if groups[j] == groups[i] and time in at_time[j]
            ]
            baseline = 0.0
            if len(others) > 1:
                baseline = math.fsum(g * w for g, w in others) / (math.fsum(w for _, w in others) + 1e-8)
            advantages[i][t] = returns[i][t] - baseline
    return advantages, returns


def whitened_gae(rewards: Rows, values: Rows, masks: list[Mask], gamma: float, lam: float) -> Result:
    advantages, returns = gae(rewards, values, masks, gamma, lam)
    return whiten(advantages, masks), returns
