"""Advantage estimators by name: what each response token was worth, and what the critic should have predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms.advantage_input import AdvantageInput, Estimator
from corral.algorithms.baselines import optimal_token_baseline, remax, tir_optimal_token_baseline
from corral.algorithms.groups import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from corral.algorithms.hooks import load
from corral.algorithms.returns import gae, reinforce_plus_plus
from corral.errors import DataError

__all__ = ["ALIASES", "ESTIMATORS", "TRAITS", "AdvantageInput", "Estimator", "Traits", "estimator"]

ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Other spellings; there is one implementation of each estimator."""

_BY_NAME: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
    "opo": opo,
    "remax": remax,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}
ESTIMATORS: dict[str, Estimator] = _BY_NAME | {alias: _BY_NAME[name] for alias, name in ALIASES.items()}


@dataclass(frozen=True)
class Traits:
    """What an estimator needs beyond rewards and masks, and which settings change its result.

    needs_groups: at least 2 samples per prompt. needs_components: scores by reward key, which then replace the rewards
    (reads_rewards False: a KL in the reward would have no effect).
    """

    needs_groups: bool = False
    needs_critic: bool = False
    needs_greedy_baseline: bool = False
    needs_sum_pi_squared: bool = False
    needs_components: bool = False
    reads_rewards: bool = True
    reads_gamma: bool = False
    reads_lam: bool = False
    reads_norm_by_std: bool = False


_TRAITS = {
    "gae": Traits(needs_critic=True, reads_gamma=True, reads_lam=True),
    "grpo": Traits(needs_groups=True, reads_norm_by_std=True),
    "grpo_passk": Traits(needs_groups=True, reads_norm_by_std=True),
    "gdpo": Traits(needs_groups=True, needs_components=True, reads_rewards=False, reads_norm_by_std=True),
    "reinforce_plus_plus": Traits(reads_gamma=True),
    "reinforce_plus_plus_baseline": Traits(needs_groups=True),
    "rloo": Traits(needs_groups=True),
    "opo": Traits(needs_groups=True),
    "remax": Traits(needs_greedy_baseline=True),
    "gpg": Traits(needs_groups=True),
    "optimal_token_baseline": Traits(needs_groups=True, needs_sum_pi_squared=True),
    "tir_optimal_token_baseline": Traits(needs_groups=True, needs_sum_pi_squared=True),
}
TRAITS: dict[str, Traits] = _TRAITS | {alias: _TRAITS[name] for alias, name in ALIASES.items()}


def estimator(spec: str) -> Estimator:
    """The estimator of that name, or the user's function at that import path, whose results are then checked.

    Raises ConfigError when there is none (see `hooks.load`).
    """
    found = load(spec, ESTIMATORS, "algorithm.adv_estimator")
    return found if spec in ESTIMATORS else _Checked(spec, found)


@dataclass(frozen=True)
class _Checked:
    """A user's estimator. Calling it raises DataError unless it gives two finite tensors [R]; what it says about
    masked tokens is dropped."""

    spec: str
    function: Estimator

    def __call__(self, batch: AdvantageInput) -> tuple[Tensor, Tensor]:
        result = self.function(batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise DataError(f"estimator {self.spec} returned {type(result).__name__}, expected (advantages, returns)")
        advantages, returns = (
            self._checked(name, x, batch) for name, x in zip(("advantages", "returns"), result, strict=True)
        )
        return advantages, returns

    def _checked(self, name: str, x: Tensor, batch: AdvantageInput) -> Tensor:
        if not isinstance(x, Tensor) or x.shape != batch.rewards.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise DataError(f"estimator {self.spec}: {name} are {got}, expected a tensor {tuple(batch.rewards.shape)}")
        chosen = torch.where(batch.mask, x.detach(), 0).to(batch.rewards.dtype)
        strange = int((~chosen.isfinite()).sum())
        if strange:
            raise DataError(f"estimator {self.spec}: {strange} of {x.numel()} {name} are not finite")
        return chosen
