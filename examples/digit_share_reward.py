"""A reward anyone can raise: the share of digits in the response. Good for seeing that training moves the right way.

Use it with reward.custom_reward_function.path=examples/digit_share_reward.py; with the reward_kwargs entry sign=-1 the
model learns to avoid digits instead.
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], sign: float = 1.0
) -> float:
    """sign × (digits / characters); an empty response scores 0."""
    if not solution_str:
        return 0.0
    return sign * sum(character.isdigit() for character in solution_str) / len(solution_str)
