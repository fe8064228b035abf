"""Scorers by the data_source of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corral.errors import DataError
from corral.rewards.gsm8k import score_math_answer

RewardFunction = Callable[..., Any]
"""Called with the keywords data_source, solution_str, ground_truth, extra_info and the reward_kwargs; may be async.
Returns a number, or a dict with "score" and further values that are logged."""

SCORERS: dict[str, RewardFunction] = {
    "openai/gsm8k": score_math_answer,
    "corral/arithmetic": score_math_answer,
}


def scorer_for(data_source: str) -> RewardFunction:
    """The built-in scorer of a data source. Raises DataError when there is none."""
    if data_source not in SCORERS:
        raise DataError(
            f"no scorer for data_source {data_source!r} (known: {', '.join(sorted(SCORERS))}); "
            "give your own with reward.custom_reward_function.path=FILE.py and .name=FUNCTION"
        )
    return SCORERS[data_source]
