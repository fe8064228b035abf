"""The Ray Jobs backend against a stand-in for the dashboard: waiting for nodes, crashes of the service, odd ends."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.backends.base import Placement, Presence
from corral.job.backends.ray_jobs import backend as ray_backend
from corral.job.backends.ray_jobs import doubts as ray_doubts
from corral.job.backends.ray_jobs import harvest as harvesting
from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.core.classify import lost
from corral.job.protocol.agent import AgentSpec, EndRecord
from corral.job.protocol.frames import data_frames, frame
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.submit import Patch, Resources
from corral.job.service.settings import RayCluster, Settings
from tests.job.backends.contract import JOB, ONE, until, until_presence
from tests.job.backends.ray_jobs.dashboard import Close, Dashboard, Job, node

NAME = f"{JOB}-a1"
SPEC = AgentSpec(
    job_id=JOB,
    attempt=1,
    submission_id=NAME,
    service_url="http://127.0.0.1:1",
    token="t" * 32,
    command=["true"],
    cwd="/",
    nodes=1,
    devices_per_node=1,
)
TWO = Resources(nodes=2, accelerators_per_node=4, kind="npu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "FRESH", 0.0)
    monkeypatch.setattr(ray_backend, "LOOK", 0.05)
    monkeypatch.setattr(ray_backend, "STOP_LOOK", 0.02)
    monkeypatch.setattr(ray_doubts, "NODES_FRESH", 0.0)
    monkeypatch.setattr(harvesting, "PAUSE", 0.02)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)


Life = Callable[[Callable[[], RayJobsBackend], Dashboard], Awaitable[None]]


def run(tmp_path: Path, life: Life, dashboard: Dashboard | None = None, **changes: object) -> None:
    """life gets what makes a backend, as a service that was just started has it."""

    async def main() -> None:
        async with dashboard or Dashboard() as there:
            cluster = RayCluster(address=there.address)
            settings = replace(Settings(tmp_path / "data", backend="ray", ray=cluster), **changes)
            await life(lambda: RayJobsBackend(settings), there)

    asyncio.run(main())


def ended(job: Job, exit_code: int = 7, content: bytes = b"hello\n") -> EndRecord:
    """The job's agent prints its last and ends."""
    record = EndRecord(
        job_id=JOB, attempt=1, exit_code=exit_code, started=1.0, ended=2.0, sources={"driver": len(content)}
    ).sealed()
    job.log += "".join(f"{line}\n" for line in [*data_frames("driver", 0, content), frame(record)])
    job.end(exit_code)
    return record


@pytest.mark.parametrize("address", [None, "", "head:8265", "ray://head:10001", "http://"])
def test_an_address_that_is_none(tmp_path, address):
    with pytest.raises(ConfigError, match=r"--address.*http://head:8265"):
        RayJobsBackend(Settings(tmp_path, ray=RayCluster(address=address)))


REFUSED = [
    (Resources(cpu="4", shm="1Gi"), Placement(), "cpu, shm"),
    (ONE, Placement(patches=(Patch(op="remove", path="/spec/x"),)), "template_patches"),
    (ONE, Placement(image="repo/image:1"), "image"),
    (ONE, Placement(head="separate"), None),
    (TWO, Placement(), None),
]


@pytest.mark.parametrize(("resources", "placement", "said"), REFUSED)
def test_what_a_cluster_that_is_there_cannot_be_asked_for(tmp_path, resources, placement, said):
    line = RayJobsBackend(Settings(tmp_path, ray=RayCluster("http://h:1"))).refusal(resources, placement)
    assert line is None if said is None else line is not None and line.startswith(f"{said}: ")


def test_a_job_waits_for_its_nodes_and_says_what_is_missing(tmp_path):
    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, TWO)
        await backend.provision(SPEC, TWO)
        seen = await backend.observe(NAME)
        assert (seen.presence, seen.message) == (Presence.STARTING, "0 of 2 nodes with 4 NPU; head has 0")
        assert seen.job_deployment_status == "Initializing"
        assert await backend.list_owned() == [NAME]
        dashboard.nodes += [node("w1", NPU=4), node("w2", NPU=2)]

        async def said(words: str) -> bool:
            return words in (await backend.observe(NAME)).message

        await until(lambda: said("1 of 2 nodes with 4 NPU; head has 0; w2 has 2"))
        dashboard.deaf = True
        await until(lambda: said("does not answer"))
        assert dashboard.jobs == {}
        dashboard.deaf = False
        dashboard.nodes.append(node("w3", NPU=4))
        await until_presence(backend, NAME, Presence.ACTIVE)
        assert dashboard.count("POST /api/jobs/") == 1

    run(tmp_path, life)


def test_what_ray_was_never_given_is_removed_without_it(tmp_path):
    async def life(make, dashboard):
        backend = make()
        dashboard.deaf = True
        with pytest.raises(InfraError, match="does not answer"):
            await backend.provision(SPEC, TWO)
        await backend.destroy(NAME)
        assert (await backend.observe(NAME)).presence is Presence.ABSENT

    run(tmp_path, life)


@pytest.mark.parametrize("end", ["stop", "destroy"])
def test_a_job_that_waits_is_ended(tmp_path, end):
    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, TWO)
        await (backend.stop(NAME, 1.0) if end == "stop" else backend.destroy(NAME))
        await until_presence(backend, NAME, Presence.ABSENT)
        dashboard.nodes += [node("w1", NPU=4), node("w2", NPU=4)]
        await backend.destroy(NAME)
        await backend.provision(SPEC, TWO)
        assert (await backend.observe(NAME)).presence is Presence.ABSENT
        assert await backend.list_owned() == []
        assert dashboard.jobs == {}

    run(tmp_path, life)


def test_a_job_that_is_stopped_while_it_is_given_to_ray_is_stopped_there(tmp_path):
    """Ray has taken it, but its answer is not here yet."""

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, TWO)
        stopping: list[asyncio.Task[None]] = []
        dashboard.on_submit = lambda job: stopping.append(asyncio.create_task(backend.stop(NAME, 1.0)))
        dashboard.nodes += [node("w1", NPU=4), node("w2", NPU=4)]
        await until(lambda: bool(stopping))
        await stopping[0]
        assert dashboard.jobs[NAME].status == "STOPPED"

    run(tmp_path, life)


def test_what_a_service_left_that_lost_the_folders_of_its_jobs_is_removed_all_the_same(tmp_path):
    async def life(make, dashboard):
        await make().provision(SPEC, ONE)
        shutil.rmtree(tmp_path / "data" / "jobs")
        later = make()
        assert await later.list_owned() == [NAME]
        await later.destroy(NAME)
        assert dashboard.jobs == {}

    run(tmp_path, life)


def test_a_service_that_dies_while_a_job_waits_leaves_nothing(tmp_path):
    async def life(make, dashboard):
        await make().provision(SPEC, TWO)
        later = make()
        assert (await later.observe(NAME)).presence is Presence.ABSENT
        dashboard.nodes += [node("w1", NPU=4), node("w2", NPU=4)]
        await later.provision(SPEC, TWO)
        await until_presence(later, NAME, Presence.ACTIVE)
        assert dashboard.count("POST /api/jobs/") <= 2
        assert len(dashboard.jobs) == 1

    run(tmp_path, life)


@pytest.mark.parametrize("at", ["POST /api/jobs/", f"GET /api/jobs/{NAME}", "GET /api/version", "GET /api/v0/nodes"])
@pytest.mark.parametrize("there", [True, False], ids=["it came", "it did not come"])
def test_a_service_that_dies_anywhere_in_a_start_starts_once(tmp_path, at, there):
    """The call gets no answer; Ray may have done what it was asked for."""

    async def life(make, dashboard):
        dashboard.answers.append((at, None))
        dying = asyncio.create_task(make().provision(SPEC, ONE))
        await until(lambda: not dashboard.answers)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        if there and at.startswith("POST"):
            dashboard.jobs[NAME] = Job(metadata={"corral_service": make()._service})
        later = make()
        assert (await later.observe(NAME)).presence in (Presence.ABSENT, Presence.STARTING, Presence.ACTIVE)
        await later.provision(SPEC, ONE)
        await later.provision(SPEC, ONE)
        assert (await later.observe(NAME)).presence is Presence.ACTIVE
        assert await later.list_owned() == [NAME]
        assert len(dashboard.jobs) == 1
        await later.destroy(NAME)
        assert dashboard.jobs == {}

    run(tmp_path, life)


def test_a_refusal_of_ray_is_a_matter_of_configuration(tmp_path):
    refusal = (400, "Traceback\nTypeError: no such field\n")

    async def life(make, dashboard):
        backend = make()
        dashboard.answers.append(("POST .*", refusal))
        with pytest.raises(ConfigError, match="no such field"):
            await backend.provision(SPEC, ONE)
        with pytest.raises(ConfigError, match=r"9 nodes of 1 devices never fit: this service has 16 devices"):
            await backend.provision(SPEC, Resources(nodes=9))
        waits = SPEC.model_copy(update={"attempt": 2, "submission_id": f"{JOB}-a2"})
        dashboard.answers.append(("POST .*", refusal))
        await backend.provision(waits, TWO)
        dashboard.nodes += [node("w1", NPU=4), node("w2", NPU=4)]
        seen = await until_presence(backend, f"{JOB}-a2", Presence.ABSENT)
        verdict = lost(seen, 6.0)
        assert verdict.failure_class is FailureClass.CONFIG
        assert "no such field" in verdict.message

    run(tmp_path, life)


def test_a_head_that_restarts_has_forgotten_its_jobs(tmp_path):
    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        dashboard.deaf = True
        with pytest.raises(InfraError, match="does not answer"):
            await backend.observe(NAME)
        dashboard.deaf = False
        assert (await backend.observe(NAME)).presence is Presence.ACTIVE
        dashboard.jobs.clear()
        verdict = lost(await backend.observe(NAME), 6.0)
        assert (verdict.status, verdict.failure_class) == (Status.NOT_FOUND, FailureClass.INFRA)
        assert "somebody deleted it" in verdict.message
        dashboard.session = "session_2"
        verdict = lost(await make().observe(NAME), 6.0)
        assert (verdict.status, verdict.failure_class) == (Status.FAILED, FailureClass.INFRA)
        assert "head was restarted" in verdict.message
        await make().provision(SPEC, ONE)  # the attempt is over: another one has to be another attempt
        assert dashboard.jobs == {}

    run(tmp_path, life)


def test_the_end_is_not_told_before_the_log_was_read(tmp_path, monkeypatch):
    """The dashboard dies right after it said that the job is over: the end record in the log still counts."""
    monkeypatch.setattr(harvesting, "SETTLE_BOUND", 0.1)
    codec = (500, "ConnectionError: agent is away")

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        record = ended(dashboard.jobs[NAME])
        dashboard.closes += [Close(0)] * 30
        dashboard.answers += [("GET .*/logs", codec)] * 30
        assert (await backend.observe(NAME)).presence is Presence.ACTIVE
        assert await backend.end_record(NAME) is None
        dashboard.deaf = True
        dashboard.cut()
        with pytest.raises(InfraError):
            await backend.observe(NAME)
        dashboard.deaf = False
        over = await until_presence(backend, NAME, Presence.ENDED)
        assert (over.exit_code, over.rayjob_status, over.job_deployment_status) == (7, "FAILED", "Failed")
        assert await backend.end_record(NAME) == record
        await backend.destroy(NAME)
        assert (backend.attempt_dir(NAME) / "driver.log").read_bytes() == b"hello\n"
        assert await make().end_record(NAME) == record

    run(tmp_path, life)


def test_a_log_that_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(harvesting, "FETCH_BOUND", 0.1)
    monkeypatch.setattr(harvesting, "SETTLE_BOUND", 0.1)

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        record = ended(dashboard.jobs[NAME])
        dashboard.closes += [Close(0)] * 1000
        dashboard.answers += [("GET .*/logs", (500, "ConnectionError: agent is away"))] * 1000
        with pytest.raises(InfraError, match="kept until its output is here"):
            await backend.destroy(NAME)
        assert NAME in dashboard.jobs
        dashboard.closes.clear()
        dashboard.answers.clear()

        async def destroyed() -> bool:
            try:
                await backend.destroy(NAME)
            except InfraError:
                return False
            return True

        await until(destroyed)
        assert dashboard.jobs == {}
        assert await backend.end_record(NAME) == record
        assert (backend.attempt_dir(NAME) / "driver.log").read_bytes() == b"hello\n"

    run(tmp_path, life)


def test_without_its_log_ray_s_exit_code_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(harvesting, "GIVE_UP", 0.3)
    codec = (500, "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        dashboard.jobs[NAME].end(7)
        dashboard.closes += [Close(0)] * 1000
        dashboard.answers += [("GET .*/logs", codec)] * 1000
        verdict = lost(await until_presence(backend, NAME, Presence.ENDED), 6.0)
        assert (verdict.status, verdict.failure_class, verdict.exit_code) == (Status.FAILED, FailureClass.USER, 7)
        await backend.destroy(NAME)
        assert dashboard.jobs == {}

    run(tmp_path, life)


def test_what_does_not_end_is_said_and_what_is_not_ours_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_backend, "STOP_BOUND", 0.2)
    other, foreign = f"{JOB}-a2", f"{JOB}-a3"

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        dashboard.answers += [("POST .*/stop", (200, '{"stopped": false}'))]
        with pytest.raises(InfraError, match="does not end: Ray says RUNNING"):
            await backend.destroy(NAME)
        assert (await backend.observe(NAME)).presence is Presence.ACTIVE
        for name in (other, foreign):
            await backend.stop(name, 1.0)
            await backend.destroy(name)
            assert dashboard.jobs[name].status == "RUNNING"
        assert await backend.list_owned() == [NAME]
        await backend.destroy(NAME)

    jobs = {other: Job(), foreign: Job(metadata={"corral_service": "another"})}
    run(tmp_path, life, Dashboard(jobs=jobs))


def test_a_job_whose_node_died_is_over_whatever_ray_says(tmp_path):
    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        dashboard.nodes.append(node("w1", CPU=4))
        dashboard.jobs[NAME].node = "id-w1"
        assert (await backend.observe(NAME)).presence is Presence.ACTIVE
        dashboard.nodes[-1]["state"] = "DEAD"
        seen = await backend.observe(NAME)
        assert (seen.presence, seen.rayjob_status) == (Presence.ENDED, "RUNNING")
        verdict = lost(seen, 6.0)
        assert (verdict.status, verdict.failure_class) == (Status.FAILED, FailureClass.INFRA)
        assert "node w1, which ran the agent, is dead" in verdict.message

    run(tmp_path, life)


def test_the_silence_of_ray_alone_is_not_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_doubts, "SILENCE", 0.3)

    async def life(make, dashboard):
        backend = make()
        await backend.provision(SPEC, ONE)
        dashboard.deaf = True

        async def silent(asks: bool) -> Presence | None:
            if asks:  # as the service does while the agent is not heard either
                with pytest.raises(InfraError):
                    await backend.fetch(NAME, {})
            try:
                return (await backend.observe(NAME)).presence
            except InfraError:
                return None

        for _ in range(8):
            assert await silent(asks=False) is None
            await asyncio.sleep(0.05)
        assert await silent(asks=True) is None
        dashboard.deaf = False
        await backend.fetch(NAME, {})  # heard once more: all is well, and the time begins anew
        dashboard.deaf = True
        dashboard.cut()
        assert await silent(asks=True) is None

        async def over() -> bool:
            return await silent(asks=True) is Presence.ENDED

        await until(over)
        verdict = lost(await backend.observe(NAME), 6.0)
        assert verdict.failure_class is FailureClass.INFRA
        assert "neither its agent nor Ray's dashboard" in verdict.message

    run(tmp_path, life)
