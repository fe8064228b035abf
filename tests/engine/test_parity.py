"""The split never changes the result: one process against real process groups, through scoring and three AdamW steps.

Everything about the split differs between the two sides: ranks, sequence parallelism, micro-batches, checkpointing,
sharding. In float64 the sides agree to 1e-9, so an error in any factor or denominator shows; float32 agrees to
rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from corral.config.plan import MicroBatches
from corral.engine.rank import Rank
from tests.engine.parity import Case, Outcome, close, gaps, train, train_all
from tests.engine.ranks import on_ranks

STATIC = MicroBatches(None, 2)


def cases_on_four_ranks(models: dict[str, Path]) -> dict[str, Case]:
    qwen3, llama, tied = models["qwen3"], models["llama"], models["qwen3-tied"]
    return {
        "actor qwen3 fp64, dp 2 sp 2, checkpointing": Case(qwen3, "actor", "float64", 2, True),
        "actor llama fp64, dp 1 sp 4 (more ranks than kv heads)": Case(llama, "actor", "float64", 4),
        "actor tied fp64, dp 4, static": Case(tied, "actor", "float64", 1, False, True, STATIC),
        "critic qwen3 fp64, dp 2 sp 2": Case(qwen3, "critic", "float64", 2, False, False),
        "critic llama fp64, dp 4 sp 1, checkpointing": Case(llama, "critic", "float64", 1, True),
        "actor llama fp32, dp 2 sp 2, static": Case(llama, "actor", "float32", 2, False, False, STATIC),
        "actor qwen3 fp32, dp 1 sp 4, checkpointing": Case(qwen3, "actor", "float32", 4, True),
        "critic qwen3 fp32, dp 2 sp 2, checkpointing": Case(qwen3, "critic", "float32", 2, True),
    }


@pytest.fixture(scope="module")
def four_ranks(models: dict[str, Path]) -> list[dict[str, Outcome]]:
    """What each of four ranks got for every case."""
    cases = cases_on_four_ranks(models)
    results = on_ranks(4, train_all, list(cases.values()))
    return [dict(zip(cases, result, strict=True)) for result in results]


NAMES = list(cases_on_four_ranks(dict.fromkeys(("qwen3", "llama", "qwen3-tied"), Path())))


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_train_like_one(name: str, models: dict[str, Path], four_ranks: list[dict[str, Outcome]]) -> None:
    case = cases_on_four_ranks(models)[name]
    one, four = train(Rank(), case.alone()), four_ranks[0][name]
    assert one.grad_norms[0] > 0.1  # something was learned
    if case.dtype == "float64":
        assert all(gap < 1e-9 for gap in gaps(one, four).values()), gaps(one, four)
        return
    for here, there in zip(one.stats, four.stats, strict=True):
        assert all(close(here[key], there[key], 1e-4, 1e-6) for key in here), gaps(one, four)
    assert close(one.grad_norms, four.grad_norms, 1e-4, 1e-6)
    assert all(close(one.before[key], four.before[key], 1e-4, 1e-5) for key in one.before)
    # Adam divides a gradient by its own size, so where one is near its eps (1e-8) float32 rounding moves the update
    # by a share of the learning rate; three steps at 1e-3 move a weight by up to 3e-3.
    assert gaps(one, four)["weights"] < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_agree(name: str, four_ranks: list[dict[str, Outcome]]) -> None:
    first = four_ranks[0][name]
    for rank in four_ranks[1:]:
        assert all(gap == 0.0 for gap in gaps(first, rank[name]).values())


def test_micro_batches_are_many(four_ranks: list[dict[str, Outcome]]) -> None:
    """The cases above do accumulate gradients and, with one data-parallel rank, run many rows."""
    assert all(outcome.micro_batches >= 2 for outcome in four_ranks[0].values())
    assert max(outcome.micro_batches for outcome in four_ranks[0].values()) >= 4


@pytest.mark.parametrize(
    "limits",
    [MicroBatches(10_000, None), MicroBatches(60, None), MicroBatches(3, None), MicroBatches(None, 5)],
    ids=["one row", "60 tokens", "all oversized", "5 samples"],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_micro_batches_change_nothing(role: str, limits: MicroBatches, models: dict[str, Path]) -> None:
    case = Case(models["qwen3"], role, "float64", checkpointing=True, limits=limits)
    assert all(gap < 1e-9 for gap in gaps(train(Rank(), case), train(Rank(), case.alone())).values())


def spoiled_and_clean(rank: Rank, folder: Path) -> tuple[Outcome, Outcome]:
    case = Case(folder, "actor", "float64", sp=2)
    return train(rank, case, spoil=1), train(rank, case)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(models: dict[str, Path]) -> None:
    """One rank's advantages are infinite in one step: nobody updates, and the other steps do not notice."""
    for spoiled, clean in on_ranks(4, spoiled_and_clean, models["qwen3"]):
        assert spoiled.skipped == [False, True, False, False]
        assert not torch.isfinite(torch.tensor(spoiled.grad_norms[1]))
        assert [spoiled.grad_norms[i] for i in (0, 2, 3)] == clean.grad_norms
        assert all(torch.equal(spoiled.weights[name], clean.weights[name]) for name in clean.weights)
