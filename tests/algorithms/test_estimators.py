"""Every estimator by name against its oracle, and what all of them promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.advantages import ALIASES, ESTIMATORS, TRAITS, AdvantageInput
from tests.algorithms.estimator_cases import Case, cases

NAMES = sorted(set(ESTIMATORS) - set(ALIASES))


def estimate(name: str, case: Case) -> tuple[Tensor, Tensor]:
    return ESTIMATORS[name](case.tensors())


def single_groups(case: Case) -> bool:
    return any(case.groups.count(g) == 1 for g in case.groups)


def check(name: str, case: Case, got: tuple[Tensor, Tensor]) -> None:
    for mine, expected in zip(got, case.expected(name), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_every_estimator_equals_its_oracle(name: str, case: Case) -> None:
    if name == "grpo_passk" and single_groups(case):
        return  # refused: see below
    check(name, case, estimate(name, case))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(case=cases(), data=st.data())
def test_the_order_of_samples_does_not_matter(name: str, case: Case, data: st.DataObject) -> None:
    if name == "grpo_passk" and single_groups(case):
        return
    order = data.draw(st.permutations(range(len(case.mask))))
    lengths = [len(row) for row in case.mask]
    for first, second in zip(estimate(name, case), estimate(name, case.permuted(order)), strict=True):
        rows = first.split(lengths)
        torch.testing.assert_close(second, torch.cat([rows[i] for i in order]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outside", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_mask_is_read(name: str, outside: float) -> None:
    """Not even the rewards, as far as no action preceded them."""
    clean = example().tensors()
    mask = clean.mask
    unowned = torch.zeros_like(mask)
    unowned[3] = True  # the tool token that opens sample 1
    unowned[8:12] = True  # the rejected sample 2
    rejected = torch.tensor([False, False, True, False, False])
    dirty = replace(
        clean,
        rewards=torch.where(unowned, outside, clean.rewards),
        baseline=torch.where(rejected, outside, clean.baseline),
        components=torch.where(rejected[:, None], outside, clean.components),
        **{
            field: torch.where(mask, getattr(clean, field), outside)
            for field in ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
        },
    )
    for got, expected in zip(ESTIMATORS[name](dirty), ESTIMATORS[name](clean), strict=True):
        assert got.isfinite().all()
        assert torch.equal(got, expected)
        assert (got[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_rejected_sample_moves_nobody_and_gets_nothing(name: str) -> None:
    """verl pull/6452 and pull/6362, NeMo-RL issue 4061: rejected responses still moved their siblings' baseline."""
    case = example()
    with_rejected = estimate(name, case)
    assert case.groups[2] == case.groups[0]
    without = case.permuted([0, 1, 3, 4])
    lengths = [len(row) for row in case.mask]
    for whole, rest in zip(with_rejected, estimate(name, without), strict=True):
        rows = whole.split(lengths)
        assert (rows[2] == 0).all()
        torch.testing.assert_close(torch.cat([rows[i] for i in (0, 1, 3, 4)]), rest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_valid_token_gives_zeros(name: str) -> None:
    case = example()
    for mask in ([[False] * len(row) for row in case.mask], [[] for _ in case.mask]):
        empty = replace(
            case, mask=mask, **{f: cut(getattr(case, f), mask) for f in ("rewards", "values", *TOKEN_FIELDS)}
        )
        for got in estimate(name, empty):
            assert got.numel() == sum(map(len, mask))
            assert (got == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_one_valid_token_in_the_whole_batch(name: str) -> None:
    case = replace(example(), mask=[[t == 1 and i == 0 for t in range(len(r))] for i, r in enumerate(example().mask)])
    check(name, case, estimate(name, case))


@pytest.mark.parametrize("name", NAMES)
def test_results_have_the_dtype_of_the_rewards(name: str) -> None:
    batch = example().tensors()
    narrow = replace(batch, rewards=batch.rewards.float(), values=batch.values.float())
    for got, expected in zip(ESTIMATORS[name](narrow), ESTIMATORS[name](batch), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_vectorized_spellings_are_aliases() -> None:
    assert len(ESTIMATORS) == 14
    assert set(ESTIMATORS) == set(TRAITS)
    for alias, name in ALIASES.items():
        assert ESTIMATORS[alias] is ESTIMATORS[name]
        assert TRAITS[alias] == TRAITS[name]


NEEDS = {
    "needs_critic": "values",
    "needs_greedy_baseline": "baseline",
    "needs_sum_pi_squared": "sum_pi_squared",
    "needs_components": "components",
}


@pytest.mark.parametrize("trait", NEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_an_estimator_needs_is_what_its_traits_say(name: str, trait: str) -> None:
    batch = example().tensors()
    without = replace(batch, **{NEEDS[trait]: None})
    if getattr(TRAITS[name], trait):
        with pytest.raises(ValueError, match=f"^{name} needs"):
            ESTIMATORS[name](without)
    else:
        assert torch.equal(ESTIMATORS[name](without)[0], ESTIMATORS[name](batch)[0])


def changed(batch: AdvantageInput, trait: str) -> AdvantageInput:
    return {
        "reads_gamma": replace(batch, gamma=0.5),
        "reads_lam": replace(batch, lam=0.5),
        "reads_norm_by_std": replace(batch, norm_by_std=not batch.norm_by_std),
        "reads_rewards": replace(batch, rewards=batch.rewards * torch.linspace(1, 2, batch.rewards.numel())),
        "needs_groups": replace(batch, group=torch.zeros_like(batch.group)),
    }[trait]


@pytest.mark.parametrize("trait", ["reads_gamma", "reads_lam", "reads_norm_by_std", "reads_rewards", "needs_groups"])
@pytest.mark.parametrize("name", NAMES)
def test_what_changes_the_result_is_what_the_traits_say(name: str, trait: str) -> None:
    batch = example().tensors()
    same = torch.equal(ESTIMATORS[name](batch)[0], ESTIMATORS[name](changed(batch, trait))[0])
    assert same is not getattr(TRAITS[name], trait)


TOKEN_FIELDS = ("log_probs", "sum_pi_squared", "weights")


def cut(rows: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    return [row[: len(keep)] for row, keep in zip(rows, mask, strict=True)]


def example() -> Case:
    """Five samples in two groups, mixed: a tool token in the middle, one at the start, a rejected sample."""
    mask = [
        [True, False, True],
        [False, True, True, True, False],
        [False, False, False, False],
        [True],
        [True, True],
    ]
    return Case(
        mask=mask,
        rewards=[[0.0, 0.25, 1.0], [3.0, 0.0, -0.5, 0.0, 2.0], [9.0, 0.0, 0.0, 9.0], [0.5], [0.25, 0.75]],
        values=[[0.5, 0.0, 0.25], [0.0, 0.125, 1.0, 0.5, 0.0], [0.0] * 4, [1.0], [0.0, -1.0]],
        groups=[5, 2, 5, 2, 5],
        log_probs=[[-0.5, 0.0, -1.0], [0.0, -2.0, -0.25, -0.125, 0.0], [0.0] * 4, [-0.75], [-0.5, -1.5]],
        sum_pi_squared=[[0.5, 0.0, 0.25], [0.0, 0.25, 0.75, 0.875, 0.0], [0.0] * 4, [0.5], [0.5, 0.25]],
        weights=[[1.0, 0.0, 0.5], [0.0, 1.5, 1.0, 1.0, 0.0], [1.0] * 4, [2.0], [1.0, 0.75]],
        baseline=[0.5, 1.0, 9.0, 1.0, 0.5],
        components=[[1.0, 0.0], [0.5, 1.0], [9.0, 9.0], [0.25, 0.0], [0.0, 0.5]],
    )
