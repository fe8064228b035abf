"""pf_ppo's draw and the adaptive KL coefficient, one sample at a time, from the formulas."""

from __future__ import annotations


def weight(scores: list[float], i: int, method: str, power: float) -> float:
    """Not normalised."""
    if method == "pow":
        return abs(scores[i]) ** power if any(scores) else 1.0
    if method == "max_min":
        return 1.0 if scores[i] in (max(scores), min(scores)) else 0.0
    assert method == "max_random"
    return 0.4 if scores[i] == max(scores) else 0.1


def next_coefficient(coefficient: float, mean_kl: float, samples: int, target: float, horizon: int) -> float:
    error = mean_kl / target - 1
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coefficient + coefficient * error * samples / horizon
