"""reward.*: scoring of responses."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.config.section import Section, key, section


@dataclass
class CustomRewardFunction(Section):
    path: str | None = key(None, "Python file or importable module with the scoring function; null: by data_source.")
    name: str = key("compute_score", "Name of the function.")
    reward_kwargs: dict[str, Any] = key({}, "Extra keyword arguments of every call.")


@dataclass
class RewardManager(Section):
    name: str = key("naive", "How scores become rewards: naive (the score on the last response token).")


@dataclass
class Reward(Section):
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction, "A scorer of your own.")
    reward_manager: RewardManager = section(RewardManager, "How scores become rewards.")
    num_workers: int | None = key(None, "Scoring processes; null: the number of CPU cores, at most 8.", "processes")
    timeout: float = key(30.0, "Time for one sample; a slower one fails the run.", "seconds")
