"""Everything that an API server can do wrong, through the whole life of a job: the verdict is right, nothing is left,
and there never is a second cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corral.job.protocol.states import JobState
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kuberay.incident import scene
from tests.job.backends.kuberay.place import BRISK, Kubernetes_, kubernetes

HASTY = replace(BRISK, silence=0.5, resync=1.0)


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        cluster.pace = HASTY
        yield cluster


FAULTS: dict[str, Callable[[FakeKube], object]] = {
    "410 as status": lambda kube: kube.faults.status(410, verb="watch", times=6),
    "410 in the stream": lambda kube: kube.faults.watch("gone", times=6),
    "409 on create": lambda kube: kube.faults.status(409, "AlreadyExists", verb="create", resource="[rs]*s", times=3),
    "409 on update": lambda kube: kube.faults.status(409, verb="patch", resource="rayjobs", times=4),
    "429": lambda kube: kube.faults.status(429, retry_after=0, verb="[cpd]*", resource="[rs]*s", times=4),
    "429 that asks to wait": lambda kube: kube.faults.status(429, retry_after=1, verb="create", resource="rayjobs"),
    "500 on writes": lambda kube: kube.faults.status(500, verb="[cpd]*", resource="[rs]*s", times=4),
    "500 on reads": lambda kube: kube.faults.status(500, verb="[glw]*", resource="[rps]*s", times=20),
    "create is done, its answer lost": lambda kube: kube.faults.lost(verb="create", resource="[rs]*s", times=2),
    "create is done, its answer cut": lambda kube: kube.faults.cut_answer(verb="create", resource="[rs]*s", times=3),
    "patch is done, its answer lost": lambda kube: kube.faults.lost(verb="patch", resource="rayjobs", times=4),
    "delete is done, its answer lost": lambda kube: kube.faults.lost(verb="delete", times=4),
    "a chunk is cut": lambda kube: kube.faults.watch("cut", times=6),
    "half open": lambda kube: kube.faults.watch("freeze", times=2),
    "watches that end at once": lambda kube: kube.faults.watch("end", times=8),
    "stale lists": lambda kube: kube.faults.stale(back=4, times=12),
    "events twice": lambda kube: kube.faults.watch("duplicate", times=None),
    "events in another order": lambda kube: kube.faults.watch("reorder", times=8),
    "events that never come": lambda kube: kube.faults.watch("miss", times=6),
}
# The others take as long again, and are here for completeness.
QUICK = {"410 as status", "410 in the stream", "409 on update", "429", "create is done, its answer lost"}
QUICK |= {"a chunk is cut", "half open", "stale lists", "events in another order"}
ALL = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name.replace(" ", "-"), marks=() if name in QUICK else pytest.mark.slow)
        for name, fault in FAULTS.items()
    ],
)


def one_of_everything(it: Kubernetes_) -> None:
    it.nothing_left()
    assert [len(made) for made in it.operator.clusters.values()] == [1]
    assert [len(head.submissions) for head in it.containers.every] == [1]


@ALL
def test_the_life_of_a_job_through_one_fault(it: Kubernetes_, fault: Callable[[FakeKube], object]) -> None:
    async def life() -> None:
        async with scene(it) as at:
            fault(it.kube)
            await at.runs()
            await at.agent_says(3)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())
    one_of_everything(it)


def test_a_token_that_expires_and_is_replaced(tmp_path: Path, it: Kubernetes_) -> None:
    """As a pod's own does. Until the new one is there, the job is not judged."""
    token = tmp_path / "token"
    token.write_text("old")
    it.kube.tokens = {"old"}
    config = it.kube.kubeconfig(tmp_path / "with-token", user={"tokenFile": str(token)})

    async def life() -> None:
        async with scene(it, kubeconfig=config) as at:
            await at.runs()
            fresh = it.kube.expire_tokens()
            job = await at.lets_pass(10.0)
            assert job.state is JobState.RUNNING
            token.write_text(fresh)
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())
    one_of_everything(it)


def test_an_api_server_that_is_away_judges_nobody(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.kube.faults.status(503, times=None)
            job = await at.lets_pass(10.0)
            assert job.state is JobState.RUNNING
            it.kube.faults.clear()
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())
    one_of_everything(it)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_storm(it: Kubernetes_, seed: int) -> None:
    """Faults of all kinds at once, again and again."""
    dice = random.Random(seed)

    async def storm() -> None:
        while True:
            dice.choice(list(FAULTS.values()))(it.kube)
            await asyncio.sleep(dice.uniform(0.0, 0.1))
            if dice.random() < 0.3:
                it.kube.faults.clear()

    async def life() -> None:
        async with scene(it) as at:
            weather = asyncio.create_task(storm())
            await at.submit()
            await asyncio.sleep(dice.uniform(0.0, 2.0))
            weather.cancel()
            it.kube.faults.clear()
            await at.is_in("Running", "RUNNING")
            await at.world.beat(at.job, "running")
            weather = asyncio.create_task(storm())
            await at.lets_pass(10.0)
            await at.agent_says(0)
            await at.lets_pass(5.0)
            weather.cancel()
            it.kube.faults.clear()
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())
    one_of_everything(it)
