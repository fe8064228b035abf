"""What went wrong with Ray jobs in the wild and takes a head with faults of its own: a stand-in for its dashboard does
it to a whole service, whose clock is turned by hand. The numbers are those of docs/incidents.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.job.backends.ray_jobs import backend as ray_backend
from corral.job.backends.ray_jobs import doubts as ray_doubts
from corral.job.backends.ray_jobs import harvest as harvesting
from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord
from corral.job.protocol.frames import data_frames, frame
from corral.job.protocol.states import JobState
from corral.job.protocol.verdict import Verdict
from corral.job.service.settings import RayCluster, Settings
from tests.job.backends.ray_jobs.dashboard import Dashboard, Job, node
from tests.job.service.reconciling import BOUND, Hand, World, end_record

STEP, PAUSE = 1.0, 0.005  # seconds of the clock that is turned, and of real time meanwhile
SLOW = pytest.mark.slow
RPC = "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"
WHOLE = {"nodes": 2, "accelerators_per_node": 8, "kind": "npu"}


@dataclass
class Scene:
    """ray: the stand-in. world: the service. job: of the one job there is."""

    ray: Dashboard
    world: World
    job: str = ""

    @property
    def name(self) -> str:
        return f"{self.job}-a1"

    @property
    def at_ray(self) -> Job:
        return self.ray.jobs[self.name]

    async def submit(self, **fields: Any) -> None:
        one = {"nodes": 1, "accelerators_per_node": 1, "kind": "cpu"}
        self.job = await self.world.submit(1, **{"resources": one, **fields})

    async def runs(self, **fields: Any) -> None:
        await self.submit(**fields)
        await self.until(lambda: self.name in self.ray.jobs)
        await self.world.beat(self.job, "preflight")
        await self.world.beat(self.job, "running")
        await self.world.reaches(self.job, JobState.RUNNING)

    async def until(self, fact: Callable[[], object]) -> None:
        end = time.monotonic() + BOUND
        while not fact():
            assert time.monotonic() < end, self.world.job(self.job)
            await self.lets_pass(STEP)

    async def lets_pass(self, seconds: float, beats: bool = False) -> JobRecord:
        """Turn the clock; beats: with an agent that is heard all the while."""
        for number in range(max(1, round(seconds / STEP))):
            if beats and number % 2 == 0:
                await self.world.beat(self.job, "running")
            self.world.hand.time += STEP
            await asyncio.sleep(PAUSE)
        return self.world.job(self.job)

    async def over(self) -> Verdict:
        """The verdict, once nothing of the job is left at Ray."""
        while not (job := self.world.job(self.job)).terminal:
            # These two have limits, and take real time on a busy machine.
            slower = {JobState.COLLECTING: 4, JobState.CLEANING: 20}.get(job.state, 1)
            self.world.hand.time += STEP / slower
            await asyncio.sleep(PAUSE)
        assert self.ray.jobs == {}
        verdict = self.world.job(self.job).verdict
        assert verdict is not None
        return verdict

    async def agent_says(self, code: int) -> None:
        """Its last word over HTTP."""
        await self.world.runner.end(self.job, end_record(self.job, code))

    def agent_prints(self, code: int, content: bytes = b"hello\n") -> EndRecord:
        """Its last word in Ray's log, with all of the output."""
        record = end_record(self.job, code, sources={"driver": len(content)})
        lines = [*data_frames("driver", 0, content), frame(record)]
        self.at_ray.log += "".join(f"{line}\n" for line in lines)
        return record

    async def tells(self, words: str) -> None:
        """Until whoever watches the job was told so."""
        await self.until(lambda: any(words in event.get("message", "") for event in self.world.events(self.job)))

    def lines(self) -> list[str]:
        return [event["line"] for event in self.world.events(self.job) if event["type"] == "log"]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Scene], Awaitable[None]]], None]:
    """Plays a scene over a service that was just started."""
    for module, name, seconds in (
        (ray_backend, "FRESH", 0.0),
        (ray_backend, "LOOK", 0.02),
        (ray_backend, "STOP_LOOK", 0.02),
        (ray_doubts, "NODES_FRESH", 0.0),
        (harvesting, "PAUSE", 0.02),
        (harvesting, "IDLE", 0.1),
    ):
        monkeypatch.setattr(module, name, seconds)
    (tmp_path / "data/src").mkdir(parents=True)
    (tmp_path / "data/src/run.sh").write_text("true\n")

    async def main(life: Callable[[Scene], Awaitable[None]]) -> None:
        async with Dashboard() as ray:
            backend = RayJobsBackend(Settings(tmp_path / "data", backend="ray", ray=RayCluster(ray.address)))
            world = World(tmp_path / "data", backend, Hand())  # type: ignore[arg-type]
            await world.runner.start()
            try:
                await life(Scene(ray, world))
            finally:
                await world.runner.close()
                await world.journal.close()

    return lambda life: asyncio.run(main(life))


@pytest.mark.parametrize("heard", [pytest.param(True, marks=SLOW), False], ids=["heard", "in Ray's log alone"])
def test_09_running_after_the_exit_with_a_huge_log(play, heard):
    """The end record ends the job, and the log is read once, however often it was looked at meanwhile."""
    content = b"".join(b"line %06d of a long log\n" % number for number in range(4_000))

    async def life(at: Scene) -> None:
        at.ray.piece = 1 << 14
        await at.runs()
        record = at.agent_prints(7, content)
        if heard:
            await at.world.runner.end(at.job, record)
        verdict = await at.over()
        assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 7)
        assert len(at.lines()) == 4_000
        assert at.ray.count("GET .*/logs.*") <= 3
        assert at.ray.count("POST .*/stop") >= 1  # it was still called running

    play(life)


@pytest.mark.parametrize("way", [pytest.param("before", marks=SLOW), "after", "log"])
def test_18_a_success_that_ray_calls_failed_after_a_head_swap(play, way):
    """way: the end record comes before or after Ray's word, or lies in its log."""

    async def life(at: Scene) -> None:
        await at.runs()
        if way == "before":
            await at.agent_says(0)
        elif way == "log":
            at.agent_prints(0)
        at.at_ray.status, at.at_ray.error_type = "FAILED", "JOB_SUPERVISOR_ACTOR_DIED"
        if way == "after":
            assert (await at.lets_pass(4.0, beats=True)).state is JobState.RUNNING
            await at.agent_says(0)
        assert (await at.over()).status == "SUCCEEDED"

    play(life)


def test_19_failed_after_one_call_that_did_not_come_through_while_the_driver_lives(play):
    """Ray's word alone does not end a job whose agent is heard."""

    async def life(at: Scene) -> None:
        await at.runs()
        at.at_ray.status, at.at_ray.error_type = "FAILED", RPC
        at.at_ray.message = "Unexpected error occurred: RpcError"
        job = await at.lets_pass(30.0, beats=True)
        assert (job.state, job.verdict) == (JobState.RUNNING, None)
        assert not await at.world.beat(at.job, "running")
        await at.agent_says(0)
        assert (await at.over()).status == "SUCCEEDED"

    play(life)


def test_19_failed_and_the_agent_is_not_heard_either(play):
    """Two that agree are believed: it is the infrastructure's, and an agent that comes back is told to stop."""

    async def life(at: Scene) -> None:
        await at.runs()
        at.at_ray.status, at.at_ray.error_type = "FAILED", RPC
        await at.lets_pass(4.0, beats=True)
        assert (await at.lets_pass(10.0)).verdict is None
        verdict = await at.over()
        assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "ray")
        assert await at.world.beat(at.job, "running")

    play(life)


def test_19_a_job_that_people_stopped_at_ray_is_over_though_its_agent_is_heard(play):
    async def life(at: Scene) -> None:
        await at.runs()
        at.at_ray.status = "STOPPED"
        while (job := at.world.job(at.job)).verdict is None:
            assert job.state is JobState.RUNNING
            await at.lets_pass(STEP, beats=True)
        assert (job.verdict.status, job.verdict.cause) == ("CANCELLED", "stopped")

    play(life)


@pytest.mark.parametrize("recovered", [True, pytest.param(False, marks=SLOW)], ids=["new head", "same session"])
def test_20_the_history_of_jobs_is_gone_after_a_recovery(play, recovered):
    async def life(at: Scene) -> None:
        await at.runs()
        at.ray.jobs.clear()
        if recovered:
            at.ray.session = "session_2"
        verdict = await at.over()
        status, cause = ("FAILED", "head_lost") if recovered else ("NOT_FOUND", "not_found")
        assert (verdict.status, verdict.failure_class, verdict.cause) == (status, "infra", cause)
        said = "knows nothing any more of the jobs it had" if recovered else "Ray knows no such job any more"
        assert said in verdict.message
        assert at.ray.count("POST /api/jobs/") == 1  # nor is it given to the new head

    play(life)


def test_20_the_history_is_gone_and_the_agent_is_heard_to_its_end(play):
    async def life(at: Scene) -> None:
        await at.runs()
        at.ray.jobs.clear()
        at.ray.session = "session_2"
        assert (await at.lets_pass(20.0, beats=True)).state is JobState.RUNNING
        await at.agent_says(3)
        verdict = await at.over()
        assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    play(life)


def test_22_pending_beyond_ray_s_own_limit(play):
    """Our start limit ends it, and Ray is told to stop and forget the job, so that it never starts."""

    async def life(at: Scene) -> None:
        def waits(job: Job) -> None:
            job.status, job.message = "PENDING", "waiting for resources: CPU 64"

        at.ray.on_submit = waits
        await at.submit(timeouts={"start": 3600})
        await at.until(lambda: at.name in at.ray.jobs)
        await at.tells("waiting for resources: CPU 64")
        at.world.hand.time += 1000  # Ray's own limit is 900 s
        assert (await at.lets_pass(10 * STEP)).state is JobState.PROVISIONING
        at.world.hand.time += 2600
        verdict = await at.over()
        assert (verdict.status, verdict.failure_class, verdict.cause) == ("TIMEOUT", "timeout", "start")
        assert "waiting for resources: CPU 64" in verdict.message
        assert at.ray.count(f"POST /api/jobs/{at.name}/stop") >= 1
        assert at.ray.count(f"DELETE /api/jobs/{at.name}") >= 1

    play(life)


def test_27_half_of_the_accelerators_are_there(play):
    """The second node comes late: the gate names what is missing, and the job starts when all of it is there."""

    async def life(at: Scene) -> None:
        at.ray.nodes.append(node("w1", NPU=8))
        await at.submit(resources=WHOLE)

        await at.tells("1 of 2 nodes with 8 NPU; head has 0")
        assert at.ray.jobs == {}
        at.ray.nodes.append(node("w2", NPU=8))
        await at.until(lambda: at.name in at.ray.jobs)
        await at.world.beat(at.job, "running")
        await at.world.reaches(at.job, JobState.RUNNING)
        await at.agent_says(0)
        assert (await at.over()).status == "SUCCEEDED"

    play(life)


def test_27_the_other_half_never_comes(play):
    async def life(at: Scene) -> None:
        at.ray.nodes += [node("w1", NPU=8), node("w2", alive=False, NPU=8)]
        await at.submit(resources=WHOLE, timeouts={"start": 3600})
        await at.tells("1 of 2 nodes with 8 NPU")
        at.world.hand.time += 3600
        verdict = await at.over()
        assert (verdict.status, verdict.cause) == ("TIMEOUT", "start")
        assert "1 of 2 nodes with 8 NPU; head has 0; w2 is dead" in verdict.message
        assert at.ray.count("POST /api/jobs/") == 0

    play(life)
