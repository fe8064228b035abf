"""The split never changes the result: every policy loss with every aggregation, and the critic.

Micro-batches of 1, 2 or all samples or of some or all tokens, data-parallel ranks, sequence-parallel ranks and the
order of the samples change neither losses and metrics, nor gradient norms, nor the weights after two optimizer steps.
The default suite tries each goal on one split; the slow test tries all goals on all splits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.algorithms.policy_losses import POLICY_LOSSES
from corral.batch import Batch
from corral.engine.rank import Rank
from tests.algorithms.ragged import MODES
from tests.engine.invariance import LIMITS, Goal, Outcome, Run, goals, make_batch, run_all, write_tiny_model
from tests.engine.ranks import on_ranks

TOLERANCE = 1e-9
GOALS = goals()
PAIRS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]  # data-parallel ranks, sequence-parallel ranks
KINDS = list(LIMITS)


def split_of(number: int) -> tuple[tuple[int, int], str]:
    """Ranks and micro-batches of a goal: those of one loss differ from each other, and from those of the next loss."""
    return PAIRS[number % len(PAIRS)], KINDS[(number + number // len(PAIRS)) % len(KINDS)]


SPLITS = {goal: split_of(number) for number, goal in enumerate(GOALS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    return make_batch(folder)


@pytest.fixture(scope="module")
def alone(folder: Path, batch: Batch) -> dict[Goal, Outcome]:
    """One process, one micro-batch a mini-batch, the samples in their order."""
    runs = [Run(goal, LIMITS["all tokens"]) for goal in GOALS]
    return dict(zip(GOALS, run_all(Rank(), folder, batch, {1: runs})[1], strict=True))


def on_world(
    world: int, folder: Path, batch: Batch, runs: dict[int, list[Run]], timeout: float = 240
) -> dict[int, list[list[Outcome]]]:
    """Outcomes of every rank, by sequence-parallel degree and run."""
    ranks = (
        [run_all(Rank(), folder, batch, runs)]
        if world == 1
        else on_ranks(world, run_all, folder, batch, runs, timeout=timeout)
    )
    return {sp: [list(of_ranks) for of_ranks in zip(*(rank[sp] for rank in ranks), strict=True)] for sp in runs}


@pytest.fixture(scope="module")
def split(folder: Path, batch: Batch) -> dict[Goal, list[Outcome]]:
    """What every rank of each goal's split got, one process group a world."""
    found = {}
    for world in sorted({dp * sp for dp, sp in PAIRS}):
        chosen = {
            sp: [goal for goal, (pair, _) in SPLITS.items() if pair == (dp, sp)] for dp, sp in PAIRS if dp * sp == world
        }
        runs = {sp: [Run(goal, LIMITS[SPLITS[goal][1]], shuffled=True) for goal in chosen[sp]] for sp in chosen}
        outcomes = on_world(world, folder, batch, runs)
        for sp, picked in chosen.items():
            found.update(zip(picked, outcomes[sp], strict=True))
    return found


def test_every_loss_and_aggregation_is_among_the_goals():
    names = {goal.name.partition("/")[0] for goal in GOALS}
    assert names == {*POLICY_LOSSES, "critic"}
    for name, loss in POLICY_LOSSES.items():
        modes = {goal.mode for goal in GOALS if goal.name.partition("/")[0] == name}
        assert modes == ({loss.aggregation} if loss.aggregation else set(MODES))
    assert {pair for pair, _ in SPLITS.values()} == set(PAIRS)
    assert {kind for _, kind in SPLITS.values()} == set(KINDS)


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_the_split_changes_nothing(goal: Goal, alone: dict[Goal, Outcome], split: dict[Goal, list[Outcome]]):
    for outcome in split[goal]:
        assert outcome.gap(alone[goal]) < TOLERANCE, SPLITS[goal]


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_the_comparison_is_demanding(goal: Goal, alone: dict[Goal, Outcome]):
    """Gradients are not tiny, weights move by about the learning rate, and whatever can be clipped or selected is."""
    metrics = alone[goal].metrics
    assert metrics["grad_norm"] > 0.1
    happened = [name for name in ("pg_clipfrac", "pg_selected", "vf_clipfrac") if name in metrics]
    assert all(0.01 < metrics[name] < 0.9 for name in happened)
    others = [outcome.weights for other, outcome in alone.items() if other.name not in (goal.name, "critic")]
    if goal.name not in ("critic", "vanilla", "bypass_mode/ppo_clip"):
        assert all(float((alone[goal].weights - weights).abs().max()) > 1e-5 for weights in others)


@pytest.fixture(scope="module")
def counted_locally(folder: Path, batch: Batch) -> dict[Goal, Outcome]:
    """The same with a bug: two ranks that each count the tokens and samples of their own share."""
    runs = [Run(goal, LIMITS["all tokens"], local=True) for goal in GOALS]
    return {goal: ranks[0] for goal, ranks in zip(GOALS, on_world(2, folder, batch, {1: runs})[1], strict=True)}


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_local_denominators_are_found(goal: Goal, alone: dict[Goal, Outcome], counted_locally: dict[Goal, Outcome]):
    if goal == Goal("gpg", "token-sum"):  # a sum, and no metric that is a mean: nothing is divided
        assert counted_locally[goal].gap(alone[goal]) < TOLERANCE
    else:
        assert counted_locally[goal].gap(alone[goal]) > 1000 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)], ids="dp {0[0]} sp {0[1]}".format)
def test_the_full_matrix(pair: tuple[int, int], folder: Path, batch: Batch, alone: dict[Goal, Outcome]):
    """All goals on all micro-batches, in one process group, the samples in another order."""
    dp, sp = pair
    runs = [Run(goal, limits, shuffled=True) for limits in LIMITS.values() for goal in GOALS]
    outcomes = on_world(dp * sp, folder, batch, {sp: runs}, timeout=900)[sp]
    wrong = [
        (str(run.goal), run.limits, rank, outcome.gap(alone[run.goal]))
        for run, ranks in zip(runs, outcomes, strict=True)
        for rank, outcome in enumerate(ranks)
        if not outcome.gap(alone[run.goal]) < TOLERANCE
    ]
    assert wrong == []
