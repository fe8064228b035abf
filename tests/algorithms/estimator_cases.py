"""Batches for the estimators as plain lists, the tensors that hold the same, and the oracle of each name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.advantages import AdvantageInput
from tests.algorithms.ragged import flat, flat_mask, masks, offsets_of, rows_like
from tests.oracles import advantages as oracle

# Multiples of 1/64: sums are exact, so scores that are equal are equal in every order of summation.
steps = st.integers(-320, 320).map(lambda n: n / 64)
# Few different scores, so that ties and groups of equal scores are likely.
coarse = st.sampled_from([0.0, 0.0, 1.0, 1.0, -0.5])


@dataclass(frozen=True)
class Case:
    """mask and the token fields: one row a sample; groups, baseline: one entry a sample; components: K a sample."""

    mask: list[list[bool]]
    rewards: list[list[float]]
    values: list[list[float]]
    groups: list[int]
    gamma: float = 1.0
    lam: float = 1.0
    by_std: bool = True
    log_probs: list[list[float]] | None = None
    sum_pi_squared: list[list[float]] | None = None
    weights: list[list[float]] | None = None
    baseline: list[float] | None = None
    components: list[list[float]] | None = None
    component_weights: tuple[float, ...] = (1.0, 0.5)

    def tensors(self) -> AdvantageInput:
        components = torch.tensor(self.components, dtype=torch.float64) if self.components else None
        return AdvantageInput(
            rewards=flat(self.rewards),
            values=flat(self.values),
            mask=flat_mask(self.mask),
            offsets=offsets_of(self.mask),
            group=torch.tensor(self.groups),
            gamma=self.gamma,
            lam=self.lam,
            norm_by_std=self.by_std,
            old_log_probs=None if self.log_probs is None else flat(self.log_probs),
            sum_pi_squared=None if self.sum_pi_squared is None else flat(self.sum_pi_squared),
            rollout_is_weights=None if self.weights is None else flat(self.weights),
            baseline=None if self.baseline is None else torch.tensor(self.baseline, dtype=torch.float64),
            components=components,
            component_weights=torch.tensor(self.component_weights, dtype=torch.float64),
        )

    def expected(self, name: str) -> tuple[Tensor, Tensor]:
        advantages, returns = self._expected(name)
        return flat(advantages).double(), flat(returns).double()

    def _expected(self, name: str) -> oracle.Result:
        rewards, mask, groups = self.rewards, self.mask, self.groups
        match name:
            case "gae":
                return oracle.whitened_gae(rewards, self.values, mask, self.gamma, self.lam)
            case "grpo":
                return oracle.grpo(rewards, mask, groups, self.by_std)
            case "grpo_passk":
                return oracle.grpo_passk(rewards, mask, groups, self.by_std)
            case "gdpo":
                return oracle.gdpo(self.components, list(self.component_weights), mask, groups, self.by_std)
            case "reinforce_plus_plus":
                return oracle.reinforce_plus_plus(rewards, mask, self.gamma)
            case "reinforce_plus_plus_baseline":
                return oracle.reinforce_plus_plus_baseline(rewards, mask, groups)
            case "rloo":
                return oracle.rloo(rewards, mask, groups)
            case "opo":
                return oracle.opo(rewards, mask, groups)
            case "gpg":
                return oracle.gpg(rewards, mask, groups)
            case "remax":
                return oracle.remax(rewards, mask, self.baseline)
        assert name in ("optimal_token_baseline", "tir_optimal_token_baseline")
        return oracle.optimal_token_baseline(
            rewards, mask, groups, self.log_probs, self.sum_pi_squared, self.weights, skip_tools=name.startswith("tir")
        )

    def permuted(self, order: list[int]) -> Case:
        """The samples in another order."""

        def pick(rows: list | None) -> list | None:
            return None if rows is None else [rows[i] for i in order]

        names = ("mask", "rewards", "values", "groups", "log_probs", "sum_pi_squared", "weights", "baseline")
        return replace(self, components=pick(self.components), **{name: pick(getattr(self, name)) for name in names})


@st.composite
def cases(draw: st.DrawFn, max_samples: int = 7) -> Case:
    """Uneven groups in any order, rejected samples and groups, tool tokens, scores that are often equal."""
    mask = draw(masks(max_samples=max_samples, max_length=7))
    samples = len(mask)
    numbers = draw(st.sampled_from([steps, coarse]))
    # A certain token (π = 1) has weight exactly 0; else the weight is far from rounding.
    probability = st.one_of(st.just(1.0), st.floats(0.05, 0.95))
    probabilities = rows_like(draw, mask, probability)
    return Case(
        mask=mask,
        rewards=rows_like(draw, mask, numbers),
        values=rows_like(draw, mask, steps),
        # At least two of each group, so that grpo_passk takes it: the last ones join group 7.
        groups=joined(draw(st.lists(st.sampled_from([3, 7, -1]), min_size=samples, max_size=samples))),
        gamma=draw(st.sampled_from([0.0, 0.9, 1.0])),
        lam=draw(st.sampled_from([0.0, 0.95, 1.0])),
        by_std=draw(st.booleans()),
        log_probs=[[math.log(p) for p in row] for row in probabilities],
        sum_pi_squared=[[p**2 + draw(st.floats(0, 1)) * (1 - p) ** 2 for p in row] for row in probabilities],
        weights=draw(st.one_of(st.none(), st.just([[draw(st.floats(0, 2)) for _ in row] for row in mask]))),
        baseline=[draw(steps) for _ in mask],
        components=[[draw(steps), draw(coarse)] for _ in mask],
    )


def joined(groups: list[int]) -> list[int]:
    """Groups of one sample become part of another group; a batch of one sample stays as it is."""
    alone = {g for g in groups if groups.count(g) == 1}
    rest = [g for g in groups if g not in alone] or [next(iter(alone), 0)]
    return [rest[0] if g in alone else g for g in groups]
