"""The service is killed at every step of bringing a job up and of taking it down, and started again: one RayJob, one
cluster, one job at Ray, and nothing left in the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from corral.job.protocol.states import JobState
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.containers import LightContainers
from tests.job.backends.kube.operator import OperatorSimulator
from tests.job.backends.kuberay.incident import Scene, scene
from tests.job.backends.kuberay.place import Kubernetes_, kubernetes
from tests.job.e2e.faults import place
from tests.job.service.reconciling import Hand

# What the service writes at the cluster, in this order, and then to Ray and back.
UP = ["POST secrets", "POST rayjobs", "PATCH secrets", "PATCH rayjobs", "POST jobs", "PATCH rayjobs"]
DOWN = ["DELETE rayjobs", "DELETE secrets"]
OFTEN: dict[int, list[Any]] = {step: [] for step in (1, 2, 4, 5, 7)}  # the others are slow tests


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        yield cluster


@dataclass
class Death:
    """Of the process, at its n-th write: done, with its answer never heard, or not done. dead: from then on nothing
    that it wanted to do happens."""

    at: int
    done: bool
    dead: asyncio.Event
    writes: list[str]


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it for the next death; the services of a test are whoever uses httpx's asynchronous client."""
    planned: list[Death] = []
    send = httpx.AsyncClient.send

    async def mortal(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        death = planned[-1] if planned else None
        if death is None:
            return await send(self, request, **options)
        if death.dead.is_set():
            await asyncio.Event().wait()
        if request.method == "GET":
            return await send(self, request, **options)
        death.writes.append(f"{request.method} {_what(request)}")
        if len(death.writes) == death.at:
            if death.done:
                answer = await send(self, request, **options)
                await answer.aread()
            death.dead.set()
            await asyncio.Event().wait()
        return await send(self, request, **options)

    def plan(at: int, done: bool = True) -> Death:
        planned.append(Death(at, done, asyncio.Event(), []))
        return planned[-1]

    monkeypatch.setattr(httpx.AsyncClient, "send", mortal)
    return plan


def _what(request: httpx.Request) -> str:
    parts = [part for part in request.url.path.split("/") if part]
    return next(part for part in ("secrets", "rayjobs", "jobs") if part in parts)


async def up_to_the_death(at: Scene, death: Death) -> None:
    """The job is brought up, and down once it runs, until the service dies."""
    at.job = "rj-000000000001"
    if at.world.store.get(at.job) is None:
        await at.submit()
    while not death.dead.is_set():
        job = at.world.job(at.job)
        if job.state is JobState.PROVISIONING and at.status().get("jobStatus") == "RUNNING":
            await at.world.beat(at.job, "running")
            await at.agent_says(0)
        await at.lets_pass(0.25)


async def up_and_down(at: Scene) -> None:
    at.job = "rj-000000000001"
    if at.world.job(at.job).state in (JobState.PROVISIONING, JobState.QUEUED, JobState.ACCEPTED):
        await at.is_in("Running", "RUNNING")
        await at.world.beat(at.job, "running")
        await at.agent_says(0)
    assert (await at.over()).status == "SUCCEEDED"


@pytest.mark.parametrize(
    ("step", "done"),
    [
        pytest.param(1, False, id="before-all", marks=pytest.mark.slow),
        *[
            pytest.param(
                step, True, id=f"{step}-{word.replace(' ', '-')}", marks=() if step in OFTEN else pytest.mark.slow
            )
            for step, word in enumerate(UP + DOWN, 1)
        ],
    ],
)
def test_killed_at_each_step_and_started_again(it: Kubernetes_, dies: Any, step: int, done: bool) -> None:
    hand = Hand()

    async def first() -> None:
        death = dies(step, done)
        async with scene(it, hand=hand) as at:
            await asyncio.wait_for(up_to_the_death(at, death), 30)
            assert death.writes == (UP + DOWN)[:step]

    async def second() -> None:
        rest = dies(1000)
        hand.time += 30
        async with scene(it, hand=hand) as at:
            await asyncio.wait_for(up_and_down(at), 30)
        assert rest.writes.count("POST jobs") <= 1

    asyncio.run(first())
    asyncio.run(second())
    it.nothing_left()
    assert {name: len(made) for name, made in it.operator.clusters.items()} == {"rj-000000000001-a1": 1}
    assert [name for head in it.containers.every for name in head.submissions] == ["rj-000000000001-a1"]


def test_killed_in_the_middle_and_the_job_cancelled_before_anybody_looks(it: Kubernetes_, dies: Any) -> None:
    """What an earlier process began is removed, though this one never started it."""
    hand = Hand()

    async def first() -> None:
        death = dies(2)
        async with scene(it, hand=hand) as at:
            await asyncio.wait_for(up_to_the_death(at, death), 30)
            await at.world.journal.write(at.world.store.request_cancel, at.job, "cancelled_by_user")

    async def second() -> None:
        dies(1000)
        async with scene(it, hand=hand) as at:
            at.job = "rj-000000000001"
            assert (await at.over()).status == "CANCELLED"

    asyncio.run(first())
    asyncio.run(second())
    it.nothing_left()
    assert [name for head in it.containers.every for name in head.submissions] == []


def test_killed_before_the_id_was_written_down_while_the_agent_was_heard(it: Kubernetes_, dies: Any) -> None:
    """Nobody provisions the job any more, and the operator has to be told all the same: it waits only so long."""
    hand = Hand()

    async def first() -> None:
        death = dies(5)
        async with scene(it, hand=hand) as at:
            await asyncio.wait_for(up_to_the_death(at, death), 30)
            await at.world.beat(at.job, "preflight")
            await at.world.reaches(at.job, JobState.PREFLIGHT)

    async def second() -> None:
        rest = dies(1000)
        async with scene(it, hand=hand) as at:
            at.job = "rj-000000000001"
            await at.is_in("Running", "RUNNING")
            assert rest.writes == ["PATCH rayjobs"]
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(first())
    asyncio.run(second())


def test_the_reaper_removes_what_a_service_left_that_lost_its_database(it: Kubernetes_, dies: Any) -> None:
    async def first() -> None:
        death = dies(5)
        async with scene(it) as at:
            await asyncio.wait_for(up_to_the_death(at, death), 30)

    async def second() -> None:
        dies(1000)
        for path in it.settings.data_dir.glob("*.db*"):
            path.unlink()
        async with scene(it) as at:
            while it.kube.objects("rayjobs") or it.kube.objects("secrets") or it.kube.objects("pods"):
                await asyncio.sleep(0.05)
            assert at.world.store.active() == []

    asyncio.run(first())
    asyncio.run(asyncio.wait_for(second(), 30))


MOMENTS: dict[str, Callable[[FakeKube], object]] = {
    "Secret": lambda kube: kube.objects("secrets"),
    "RayJob": lambda kube: kube.objects("rayjobs"),
    **{
        state: lambda kube, state=state: any(  # type: ignore[misc]
            (one.get("status") or {}).get("jobDeploymentStatus") == state for one in kube.objects("rayjobs")
        )
        for state in ("Initializing", "Waiting", "Running", "Complete")
    },
    "gone": lambda kube: any(one["metadata"].get("deletionTimestamp") for one in kube.objects("rayjobs")),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_of_the_process_as_soon_as_there_is(tmp_path: Path, moment: str) -> None:
    """The service as a process, an agent as a process; every line of the job comes, once."""
    with FakeKube() as kube, OperatorSimulator(kube, LightContainers()) as operator:
        config = tmp_path / "service.yaml"
        kubernetes = {"kubeconfig": str(kube.kubeconfig(tmp_path / "kubeconfig")), "image": "corral:test"}
        nodes = {"agent_dir": str(tmp_path / "nodes"), "python": sys.executable}
        config.write_text(yaml.safe_dump({"backend": "kuberay", "nodes": nodes, "kubernetes": kubernetes}))
        with place("--config", config) as at:
            at.script("counts.sh", "seq 1 300")
            client = at.submit("--kind", "cpu", script="counts.sh")
            kube.wait(lambda: MOMENTS[moment](kube), 60)
            at.service.kill()
            at.service.start()
            assert client.done(120.0) == 0, client.err[-3000:]
            assert client.lines == [str(number) for number in range(1, 301)]
            for plural in ("rayjobs", "rayclusters", "pods", "secrets"):
                kube.wait(lambda plural=plural: not kube.objects(plural), 60)  # type: ignore[misc]
            assert [len(made) for made in operator.clusters.values()] == [1]
