"""The reconciler with a scripted backend: what is decided when, what follows, and that a restart changes nothing."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.backends.base import Capacity, Presence
from corral.job.protocol.states import FailureClass, JobState, Status
from tests.job.service.reconciling import Hand, Part, ScriptedBackend, World, end_record, until, world

NO_LIMITS = {"queue": None, "start": None, "run": None, "idle": None, "hang": None}
A1, A2 = "rj-000000000000-a1", "rj-000000000000-a2"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_job_that_succeeds(tmp_path: Path) -> None:
    async def test() -> None:
        backend = ScriptedBackend()
        async with world(tmp_path, backend) as it:
            job_id = await it.submit(env={"A": "1"}, args=["x"])
            await it.runs(job_id)
            job = await it.finishes(job_id, 0)
            assert (job.state, job.verdict.status if job.verdict else None) == (JobState.SUCCEEDED, Status.SUCCEEDED)
            assert None not in (job.admitted, job.running, job.finished)
            way = ["ACCEPTED", "QUEUED", "PROVISIONING", "PREFLIGHT", "RUNNING", "COLLECTING", "CLEANING", "SUCCEEDED"]
            assert it.states(job_id) == way
            assert it.events(job_id)[-1]["type"] == "final"
            await until(lambda: [after for _, _, after in it.changes] == way[2:])
            assert backend.calls == [("provision", A1), ("destroy", A1)]
            spec = backend.parts[A1].spec
            assert spec.command == ["bash", str(tmp_path / "src/run.sh"), "x"]
            assert (spec.env, spec.token, spec.service_url) == ({"A": "1"}, "t" * 32, it.settings.url)

    run(test())


def test_a_failure_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, ScriptedBackend()) as it:
            job_id = await it.submit(retry={"infra": 3})
            await it.runs(job_id)
            job = await it.finishes(job_id, 3, failing_rank=5, first_error="ValueError: no")
            assert job.state is JobState.FAILED
            assert job.attempt == 1
            assert job.verdict is not None
            assert (job.verdict.failure_class, job.verdict.exit_code) == (FailureClass.USER, 3)

    run(test())


def test_what_can_never_start_is_a_failure_of_the_configuration(tmp_path: Path) -> None:
    async def test() -> None:
        backend = ScriptedBackend(trouble=ConfigError("no such image"))
        async with world(tmp_path, backend) as it:
            refused = await it.ends(await it.submit(0, retry={"infra": 1}))
            secret = await it.ends(await it.submit(1, secrets=["MISSING"]))
            for job, said in ((refused, "no such image"), (secret, "secret MISSING")):
                assert job.state is JobState.FAILED
                assert job.attempt == 1
                assert job.verdict is not None
                assert job.verdict.failure_class is FailureClass.CONFIG
                assert said in job.verdict.message
            assert backend.calls.count(("provision", A1)) == 1

    run(test())


def test_who_waits_for_nodes_is_told_what_is_missing(tmp_path: Path) -> None:
    def starts(part: Part) -> None:
        part.presence, part.message = Presence.STARTING, "1 of 2 nodes with 4 NPU"

    async def test() -> None:
        backend = ScriptedBackend(trouble=InfraError("no answer from the\ncluster"), on_start=starts)
        async with world(tmp_path, backend) as it:
            job_id = await it.submit()

            def told() -> list[tuple[str, str]]:
                return [(each["phase"], each["message"]) for each in it.events(job_id) if each["type"] == "phase"]

            await it.reaches(job_id, JobState.PROVISIONING)
            await until(lambda: len(backend.calls) >= 1)
            assert told() == []  # it may pass in a moment
            it.hand.time += 5.0
            await until(lambda: len(told()) == 1)
            backend.trouble = None
            it.hand.time += 5.0
            await until(lambda: len(told()) == 2)
            backend.parts[A1].message = "0 of 2 nodes with 4 NPU"
            it.hand.time += 4.0
            await it.runs(job_id)
            assert told() == [
                ("PROVISIONING", "no answer from the cluster"),
                ("PROVISIONING", "1 of 2 nodes with 4 NPU"),
            ]

    run(test())


def test_secrets_reach_the_agent_alone(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "KEY").write_text("s3cret\n")
        backend = ScriptedBackend()
        async with world(tmp_path, backend, secrets_dir=tmp_path / "secrets") as it:
            job_id = await it.submit(secrets=["KEY"])
            await until(lambda: A1 in backend.parts)
            assert backend.parts[A1].spec.secrets == {"KEY": "s3cret"}
            assert "s3cret" not in it.job(job_id).request.model_dump_json()

    run(test())


def test_trouble_while_starting_passes_or_is_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend(trouble=InfraError("no memory"))
        async with world(tmp_path, backend, hand) as it:
            first, second = await it.submit(0), await it.submit(1, timeouts=NO_LIMITS | {"start": 40})
            await until(lambda: len(backend.calls) >= 2)
            assert {it.job(job_id).state for job_id in (first, second)} == {JobState.PROVISIONING}
            for _ in range(45):
                hand.time += 1
                await asyncio.sleep(0.02)
            job = await it.ends(second)
            assert job.verdict is not None
            assert job.verdict.failure_class is FailureClass.INFRA
            assert "could not be started within 40 s: no memory" in job.verdict.message
            assert it.job(first).state is JobState.PROVISIONING
            backend.trouble = None
            hand.time += 60
            await it.runs(first)

    run(test())


def test_only_failures_of_the_infrastructure_are_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend()
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit(retry={"infra": 1})
            await it.runs(job_id)
            backend.parts[A1].presence = Presence.ENDED
            await asyncio.sleep(0.1)
            assert it.job(job_id).state is JobState.RUNNING  # an end record may still come
            hand.time += 6
            await until(lambda: A2 in backend.parts)
            assert backend.parts[A1].presence is Presence.ABSENT
            assert await it.beat(job_id, "running", 1)  # the first agent, if it lives after all
            assert not await it.beat(job_id, "running", 2)
            job = await it.finishes(job_id, 0, 2)
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
            assert it.states(job_id).count("RETRYING") == 1
            assert ("stop", A1) in backend.calls

    run(test())


def test_an_agent_is_not_told_to_stop_before_the_verdict_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        backend = ScriptedBackend()
        async with world(tmp_path, backend) as it:
            job_id = await it.submit()
            await it.runs(job_id)
            it.store.request_cancel(job_id, "user")  # the runner has not looked yet
            assert it.job(job_id).state is JobState.RUNNING
            assert not await it.beat(job_id, "running")
            it.runner.wake()
            await until(lambda: it.job(job_id).state is JobState.COLLECTING)
            assert await it.beat(job_id, "running")
            assert (await it.finishes(job_id, 143)).state is JobState.CANCELLED

    run(test())


@pytest.mark.parametrize("kind", ["queue", "start", "run", "idle", "hang"])
def test_each_deadline(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        hand = Hand()
        async with world(tmp_path, ScriptedBackend(), hand) as it:
            if kind == "queue":
                await it.submit(99, resources={"nodes": 1, "accelerators_per_node": 8})
            job_id = await it.submit(timeouts=NO_LIMITS | {kind: 50})
            if kind in ("run", "idle", "hang"):
                await it.runs(job_id, output_bytes=1, progress=1)
            elif kind == "start":
                await it.reaches(job_id, JobState.PROVISIONING)
            for beat in range(2, 6):  # time in which all moves
                hand.time += 12
                if kind in ("idle", "hang"):
                    await it.beat(job_id, "running", output_bytes=beat, progress=beat)
                await asyncio.sleep(0.03)
            if kind in ("idle", "hang"):
                other = {"progress": 9} if kind == "idle" else {"output_bytes": 9}
                still = {"output_bytes": 5, "progress": 5} | other
                await it.beat(job_id, "running", **still)
                assert it.job(job_id).state is JobState.RUNNING
                hand.time += 51
            else:
                assert not it.job(job_id).terminal
                hand.time += 3
            if kind in ("run", "idle", "hang"):
                await it.reaches(job_id, JobState.COLLECTING)
                assert await it.beat(job_id, "running")
                it.backend.parts[A1].presence = Presence.ENDED
            elif kind == "start":
                await it.reaches(job_id, JobState.COLLECTING)
                it.backend.parts[A1].presence = Presence.ENDED
            job = await it.ends(job_id)
            assert job.state is JobState.TIMEOUT
            assert job.verdict is not None
            assert job.verdict.cause == kind

    run(test())


@pytest.mark.parametrize("state", ["QUEUED", "PROVISIONING", "PREFLIGHT", "RUNNING", "COLLECTING", "CLEANING"])
def test_cancel_in_every_state(state: str, tmp_path: Path) -> None:
    """Once the verdict is fixed a cancel comes too late."""

    async def test() -> None:
        backend = ScriptedBackend(hold=asyncio.Event() if state == "PROVISIONING" else None)
        async with world(tmp_path, backend) as it:
            if state == "QUEUED":
                await it.submit(99, resources={"nodes": 1, "accelerators_per_node": 8})
            job_id = await it.submit()
            if state in ("PREFLIGHT", "RUNNING", "COLLECTING", "CLEANING"):
                await until(lambda: A1 in backend.parts)
                await it.beat(job_id, "preflight")
            if state in ("RUNNING", "COLLECTING", "CLEANING"):
                await it.beat(job_id, "running")
                await it.reaches(job_id, JobState.RUNNING)
            backend.stuck = state == "CLEANING"
            if state in ("COLLECTING", "CLEANING"):
                missing = {"driver": 10} if state == "COLLECTING" else {}
                await it.runner.end(job_id, end_record(job_id, 0, sources=missing))
            await it.reaches(job_id, JobState(state))
            await it.cancels(job_id)
            if state == "PROVISIONING":
                await it.reaches(job_id, JobState.COLLECTING)
                assert backend.hold is not None
                backend.hold.set()
                await until(lambda: ("stop", A1) in backend.calls)
            if state in ("PROVISIONING", "PREFLIGHT", "RUNNING"):
                await until(lambda: ("stop", A1) in backend.calls)
                assert await it.beat(job_id, "running")
            for part in backend.parts.values():
                part.presence = Presence.ENDED if part.spec.job_id == job_id else part.presence
            backend.stuck = False
            it.hand.time += 2
            job = await it.ends(job_id)
            late = state in ("COLLECTING", "CLEANING")
            assert job.state is (JobState.SUCCEEDED if late else JobState.CANCELLED)
            assert job.verdict is not None
            assert late or job.verdict.cause == "cancelled_by_user"
            assert A1 not in await backend.list_owned()

    run(test())


def test_a_backend_that_does_not_answer_decides_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend()
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit(timeouts=NO_LIMITS)
            await it.runs(job_id)
            backend.deaf = True
            for _ in range(10):
                hand.time += 3600
                await asyncio.sleep(0.02)
            assert it.job(job_id).state is JobState.RUNNING
            backend.deaf = False
            assert (await it.finishes(job_id, 0)).state is JobState.SUCCEEDED

    run(test())


def test_a_lease_that_nobody_renews_ends_the_job(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend()
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit(lease=100, timeouts=NO_LIMITS)
            await it.runs(job_id)
            for _ in range(5):  # nobody wakes the runner for a renewal
                hand.time += 90
                await it.journal.write(it.store.renew_lease, job_id)
                await asyncio.sleep(0.02)
            assert it.job(job_id).state is JobState.RUNNING
            hand.time += 101
            await it.reaches(job_id, JobState.COLLECTING)
            backend.parts[A1].presence = Presence.ENDED
            job = await it.ends(job_id)
            assert job.verdict is not None
            assert (job.state, job.verdict.cause) == (JobState.CANCELLED, "lease")

    run(test())


@pytest.mark.parametrize("finished", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_five_hundred_jobs_start_in_order_within_the_capacity(finished: int) -> None:
    """In memory where there is such a folder: the disk's speed is not what this is about."""
    order: list[str] = []
    held: list[int] = []

    async def test(data_dir: Path) -> None:
        backend = ScriptedBackend(Capacity(16, 4, 8))

        def start(part: Part) -> None:
            order.append(part.spec.job_id)
            there = [each.spec for each in backend.parts.values() if each.presence is not Presence.ABSENT]
            held.append(sum(spec.nodes * spec.devices_per_node for spec in there))
            part.end, part.presence = end_record(part.spec.job_id, 0), Presence.ENDED

        backend.on_start = start
        it = World(data_dir, backend, Hand())
        ids = []
        for number in range(500):
            asked = {"nodes": 1, "accelerators_per_node": (1, 2, 8, 4)[number % 4]}
            ids.append(await it.submit(number, resources=asked, timeouts=NO_LIMITS))
        await it.runner.start()
        await until(lambda: [after for _, _, after in it.changes].count("SUCCEEDED") >= finished)
        await it.runner.close()
        assert {it.job(job_id).state for job_id in ids[: finished - 16]} == {JobState.SUCCEEDED}
        admitted = [job_id for job_id, _, after in it.changes if after == "PROVISIONING"]
        assert len(admitted) >= finished
        assert admitted == ids[: len(admitted)]
        assert len(set(order)) == len(order) >= finished
        assert max(held) <= 16
        await it.journal.close()

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        run(test(Path(folder)))


def test_orders_to_agents_that_nobody_waits_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, ScriptedBackend()) as it:
            assert await it.beat("rj-00000000dead", "running")
            job_id = await it.submit()
            await it.runs(job_id)
            assert not await it.beat(job_id, "running")
            assert await it.beat(job_id, "running", 7)
            await it.runner.end(job_id, end_record(job_id, 0, 7))
            await it.runner.end(job_id, end_record("rj-00000000dead", 0))
            await asyncio.sleep(0.1)
            assert it.job(job_id).state is JobState.RUNNING
            await it.cancels(job_id)
            await until(lambda: it.job(job_id).state is not JobState.RUNNING)
            assert await it.beat(job_id, "running")

    run(test())


# A service that was killed ----------------------------------------------------------------------------------------
