"""Remote backends: an agent that cannot reach the service is listened to through the cluster; local ones never are."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from corral.errors import InfraError
from corral.job.backends import folder as files
from corral.job.backends.base import Presence
from corral.job.protocol.agent import Heartbeat
from corral.job.protocol.states import JobState, Status
from tests.job.service.reconciling import Hand, ScriptedBackend, World, end_record, until, world

JOB, A1 = "rj-000000000000", "rj-000000000000-a1"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def beat(phase: str, attempt: int = 1, **fields: Any) -> Heartbeat:
    return Heartbeat.model_validate({"attempt": attempt, "phase": phase, **fields})


class Cluster(ScriptedBackend):
    """A backend whose log holds what a test puts there; it is gone when the submission is destroyed."""

    def __init__(self, data_dir: Path, remote: bool = True) -> None:
        super().__init__(remote=remote, on_fetch=self._read)
        self.folders[A1] = files.attempt_folder(data_dir, JOB, 1)
        self.output, self.heard = b"", list[Heartbeat]()
        self.unreachable = False

    def _read(self, submission_id: str) -> Heartbeat | None:
        self.calls.append(("fetch", submission_id))
        if self.unreachable:
            raise InfraError("no route to the cluster")
        part = self.parts.get(submission_id)
        if part is None or part.presence is Presence.ABSENT:
            return None
        folder = self.folders[submission_id]
        files.make(folder)
        (folder / "driver.log").write_bytes(self.output)
        if part.end is not None:
            files.write_private(folder / files.END, part.end.model_dump_json())
        return self.heard.pop() if self.heard else None

    def did(self, what: str) -> int:
        return sum(call == (what, A1) for call in self.calls)


async def provisioned(it: World) -> None:
    await it.submit()
    await until(lambda: A1 in it.backend.parts)


def test_what_is_said_at_the_cluster_moves_a_job_on_to_its_end(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            it.hand.time += 9.0
            await asyncio.sleep(0.1)
            assert backend.fetched == []  # it may still be heard
            backend.heard, backend.output = [beat("running", progress=4)], b"one\ntwo\nhalf"
            it.hand.time += 2.0
            await it.reaches(JOB, JobState.RUNNING)
            await until(lambda: it.store.watermarks(JOB, 1) == {"driver": 8})
            fetches = backend.did("fetch")
            await asyncio.sleep(0.05)
            assert backend.did("fetch") == fetches  # heard just now
            backend.output += b" and whole\nlast"
            backend.parts[A1].end = end_record(JOB, 3, sources={"driver": len(backend.output)})
            it.hand.time += 11.0
            await it.reaches(JOB, JobState.COLLECTING)
            it.hand.time += 16.0  # the agent still tries to reach the service
            job = await it.ends(JOB)
            assert job.verdict is not None
            assert (job.verdict.status, job.verdict.exit_code) == (Status.FAILED, 3)
            lines = [event["line"] for event in it.events(JOB) if event["type"] == "log"]
            assert lines == ["one", "two", "half and whole", "last"]
            assert {"driver": 8} in backend.fetched

    run(test())


def test_fetched_before_destroyed_and_not_after(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            await it.runs(JOB)
            backend.output = b"said aside\n"
            backend.parts[A1].presence = Presence.ENDED
            await it.runner.end(JOB, end_record(JOB, 0))
            await it.ends(JOB)
            assert [what for what, _ in backend.calls][-2:] == ["fetch", "destroy"]
            assert [event["line"] for event in it.events(JOB) if event["type"] == "log"] == ["said aside"]

    run(test())


def test_a_cluster_that_does_not_answer_keeps_no_job_from_its_end(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        backend.unreachable = True
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            it.hand.time += 11.0
            await until(lambda: backend.did("fetch") > 0)
            assert it.job(JOB).state is JobState.PROVISIONING
            await it.runs(JOB)
            backend.parts[A1].presence = Presence.ENDED
            await it.runner.end(JOB, end_record(JOB, 0))
            assert (await it.ends(JOB)).state is JobState.SUCCEEDED

    run(test())


def test_nothing_is_asked_while_nodes_come_up(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        backend.on_start = lambda part: setattr(part, "presence", Presence.STARTING)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            it.hand.time += 12.0
            await until(lambda: it.runner._attempts.seen(it.job(JOB)).observation is not None)
            await asyncio.sleep(0.05)
            assert backend.fetched == []

    run(test())


def test_a_local_backend_is_never_asked(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path, remote=False)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            await it.runs(JOB)
            it.hand.time += 60.0
            await asyncio.sleep(0.05)
            await it.finishes(JOB, 0)
            assert backend.fetched == []

    run(test())


def test_an_attempt_that_is_over_is_not_heard(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            backend.heard = [beat("running", attempt=2)]
            it.hand.time += 11.0
            await until(lambda: not backend.heard)
            await asyncio.sleep(0.05)
            assert it.job(JOB).state is JobState.PROVISIONING

    run(test())


def test_the_nodes_stay_until_the_agent_has_sent_its_records(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Cluster(tmp_path)
        async with world(tmp_path, backend) as it:
            await provisioned(it)
            await it.runs(JOB)
            await it.runner.end(JOB, end_record(JOB, 0))
            await it.beat(JOB, "collecting")
            await it.reaches(JOB, JobState.COLLECTING)
            await asyncio.sleep(0.1)
            assert it.job(JOB).state is JobState.COLLECTING
            backend.parts[A1].presence = Presence.ENDED
            assert (await it.ends(JOB)).state is JobState.SUCCEEDED
            assert not [event for event in it.events(JOB) if event["type"] == "warning"]

    run(test())


def test_an_agent_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        backend, hand = Cluster(tmp_path), Hand()
        async with world(tmp_path, backend, hand) as it:
            await provisioned(it)
            await it.runs(JOB)
            await it.runner.end(JOB, end_record(JOB, 0))
            await it.reaches(JOB, JobState.COLLECTING)
            for _ in range(11):
                hand.time += 10.0
                await it.beat(JOB, "collecting")
            assert (await it.ends(JOB)).state is JobState.SUCCEEDED
            assert not [event for event in it.events(JOB) if event["type"] == "warning"]

    run(test())
