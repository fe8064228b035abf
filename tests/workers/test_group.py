"""The driver's cutting and gathering, with workers that compute something obvious from the tokens they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.aggregate import Denominators
from corral.batch import Batch
from corral.config.plan import ActorUpdate, MicroBatches
from corral.engine.memory import DeviceMemory
from corral.rollout.base import Completion, Request
from corral.workers.group import WorkerGroup, mini_batches
from corral.workers.update import OptimizerStep, summarise
from corral.workers.worker import Share, StepStats
from tests.plans import tiny_plan


def make_batch(lengths: Sequence[tuple[int, int]]) -> Batch:
    """Samples of (prompt, response) lengths, every token a different number."""
    ids = iter(range(1, 1_000_000))
    return Batch.from_samples(
        [[next(ids) for _ in range(p)] for p, _ in lengths],
        [[next(ids) for _ in range(r)] for _, r in lengths],
        row=list(range(len(lengths))),
        sample_index=[0] * len(lengths),
        group=list(range(len(lengths))),
        finish=["stop"] * len(lengths),
        rollout_log_probs=[[0.0] * r for _, r in lengths],
    )


class Squares:
    """Answers every token with its square, so a token that is lost, moved or doubled shows."""

    def infer(self, role: str, share: Share, temperature: float, *asked: bool) -> dict[str, torch.Tensor]:
        assert sorted(i for row in share.micro for i in row) == list(range(len(share.batch)))
        return {"values": share.batch.response_ids.double() ** 2}

    def generate(self, requests: Sequence[Request], sampling: Any, step: int) -> list[Completion]:
        return [Completion((r.row,), (0.0,), "stop") for r in requests]


class OneByOne:
    """Calls the workers of all ranks in this process, one after the other."""

    def __init__(self, world: int) -> None:
        self.workers = [Squares() for _ in range(world)]
        self.ranks: list[Any] = []

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(worker, method)(*a) for worker, a in zip(self.workers, args, strict=True)]

    def close(self) -> None: ...


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=20),
    split=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 2), (3, 1)]),
    limits=st.sampled_from(
        [MicroBatches(40, None), MicroBatches(10_000, None), MicroBatches(None, 1), MicroBatches(None, 3)]
    ),
)
def test_results_come_back_in_the_order_of_the_batch(lengths, split, limits):
    world, sp = split
    plan = tiny_plan(world=world, sp=sp)
    plan = replace(plan, critic=replace(plan.critic, infer=limits))
    batch = make_batch(lengths)
    got = WorkerGroup(OneByOne(world), plan).infer("critic", batch)["values"]
    assert torch.equal(got, batch.response_ids.double() ** 2)


class Places(Squares):
    """Answers with its own number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def infer(self, role: str, share: Share, temperature: float, *asked: bool) -> dict[str, torch.Tensor]:
        return {"values": torch.full_like(share.batch.response_ids, self.rank)}

    def generate(self, requests: Sequence[Request], sampling: Any, step: int) -> list[Completion]:
        return [Completion((self.rank,), (0.0,), "stop") for _ in requests]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=20),
    split=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 2), (3, 1)]),
)
def test_who_computes_a_sample_is_known(lengths, split):
    world, sp = split
    plan = tiny_plan(world=world, sp=sp)
    launcher = OneByOne(world)
    launcher.workers = [Places(rank) for rank in range(world)]
    group, batch = WorkerGroup(launcher, plan), make_batch(lengths)
    values = group.infer("critic", batch)["values"]
    assert group.inference_ranks("critic", batch) == values[batch.response_offsets[:-1]].tolist()
    requests = [Request((1,), row, 0) for row in range(len(batch))]
    made = group.generate(requests, plan.rollout.sampling, 1)
    assert group.replica_ranks(len(batch)) == [completion.token_ids[0] for completion in made]


@given(count=st.integers(0, 30), world=st.integers(1, 8))
def test_completions_come_back_in_the_order_of_the_requests(count, world):
    requests = [Request((1,), row, 0) for row in range(count)]
    plan = tiny_plan(world=world, sp=1)
    done = WorkerGroup(OneByOne(world), plan).generate(requests, plan.rollout.sampling, 1)
    assert [c.token_ids[0] for c in done] == list(range(count))


class Recorder(Squares):
    """Answers, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Request], Any, int]] = []

    def generate(self, requests: Sequence[Request], sampling: Any, step: int) -> list[Completion]:
        self.asked.append((list(requests), sampling, step))
        return super().generate(requests, sampling, step)


@given(count=st.integers(0, 30), replicas=st.integers(1, 5), tp=st.integers(1, 4))
def test_a_request_goes_to_all_ranks_of_one_replica(count: int, replicas: int, tp: int) -> None:
    plan = tiny_plan(world=replicas * tp)
    rollout = replace(plan.rollout, replicas=replicas, tensor_model_parallel_size=tp)
    launcher = OneByOne(plan.topology.world)
    launcher.workers = recorders = [Recorder() for _ in range(plan.topology.world)]
    group = WorkerGroup(launcher, replace(plan, rollout=rollout))
    requests = [Request((1,), row, 0) for row in range(count)]
    done = group.generate(requests, rollout.val_sampling, 3)
    assert [completion.token_ids[0] for completion in done] == list(range(count))
    calls = [recorder.asked for recorder in recorders]
    assert [len(asked) for asked in calls] == [1] * len(recorders)  # also those that get nothing: they go in step
    assert all(asked[0][1:] == (rollout.val_sampling, 3) for asked in calls)
    given_to = [asked[0][0] for asked in calls]
    for first in range(0, len(recorders), tp):
        assert all(given_to[rank] == given_to[first] for rank in range(first, first + tp))
    assert [request for part in given_to[::tp] for request in part] == requests
    sizes = [len(part) for part in given_to[::tp]]
    assert max(sizes) - min(sizes) <= 1
    assert group.replica_ranks(count) == [rank for rank in range(0, len(given_to), tp) for _ in given_to[rank]]


def update(**changes: Any) -> ActorUpdate:
    return replace(tiny_plan().actor_update, **changes)


def test_mini_batches_keep_the_samples_of_a_prompt_together_and_cover_every_sample_once_an_epoch():
    batch = make_batch([(2, 3)] * 12)
    parts = mini_batches(batch, update(mini_batch_prompts=2, epochs=2, shuffle=True), n=3, step=1)
    assert [len(part) for part in parts] == [6, 6] * 2
    for epoch in (parts[:2], parts[2:]):
        assert sorted(i for part in epoch for i in part) == list(range(12))
    for part in parts:
        assert all(part[k : k + 3] == [part[k], part[k] + 1, part[k] + 2] and part[k] % 3 == 0 for k in (0, 3))


def test_shuffled_mini_batches_differ_between_epochs_and_steps_but_not_between_runs():
    batch = make_batch([(2, 3)] * 16)
    plan = update(mini_batch_prompts=8, epochs=2, shuffle=True)
    first = mini_batches(batch, plan, n=1, step=1)
    assert first == mini_batches(batch, plan, n=1, step=1)
    assert first[0] != first[2]
    assert first != mini_batches(batch, plan, n=1, step=2)


def test_iteration_statistics_weigh_token_means_by_tokens_and_leave_skipped_steps_out():
    def step(value: float, skipped: bool = False) -> StepStats:
        return StepStats({"pg_loss": value, "pg_clipfrac": value}, grad_norm=value, skipped=skipped)

    ranks = [[step(1.0), step(float("nan"), skipped=True), step(2.0)] for _ in range(2)]
    denominators = [Denominators(tokens, 8) for tokens in (30, 50, 10)]
    steps = [OptimizerStep.of([], denominators[k], [rank[k] for rank in ranks]) for k in range(3)]
    done = summarise("actor", steps, lr=0.5)
    assert done.skipped == 1
    assert done.metrics["pg_loss"] == pytest.approx((2 + 4) / 2)  # sums over ranks, mean of the two steps taken
    assert done.metrics["pg_clipfrac"] == pytest.approx((2 * 30 + 4 * 10) / 40)
    assert done.metrics["grad_norm"] == pytest.approx(1.5)
    assert done.metrics["lr"] == 0.5


def test_memory_is_that_of_the_rank_that_had_most():
    memories = [DeviceMemory(1, 2, 3 << 30, 4 << 30), DeviceMemory(1, 2, 5 << 30, 6 << 30), None]
    ranks = [StepStats({}, grad_norm=1.0, skipped=False, memory=memory) for memory in memories]
    done = summarise("actor", [OptimizerStep.of([], Denominators(1, 1), ranks)], lr=0.5)
    assert done.metrics["perf/max_memory_allocated_gb"] == 5
    assert done.metrics["perf/max_memory_reserved_gb"] == 6
    without = summarise("actor", [OptimizerStep.of([], Denominators(1, 1), ranks[2:])], lr=0.5)
    assert not any(name.startswith("perf/") for name in without.metrics)


def test_an_oversized_sample_is_said_once_and_still_answered(caplog):
    plan = tiny_plan(world=2, sp=1)
    plan = replace(plan, critic=replace(plan.critic, infer=MicroBatches(10, None)))
    batch = make_batch([(5, 20), (2, 2)])
    group = WorkerGroup(OneByOne(2), plan)
    for _ in range(2):
        assert torch.equal(group.infer("critic", batch)["values"], batch.response_ids.double() ** 2)
    assert [r.message for r in caplog.records] == [
        "data row 0: a sample of 25 tokens is over the critic's budget of 10, it gets a micro-batch of its own"
    ]
