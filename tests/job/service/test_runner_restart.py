"""Jobs that an earlier service, a lost agent or nobody has left: the reconciler goes on with them, or removes them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from corral.job.backends.base import Presence
from corral.job.protocol.states import JobState
from tests.job.service.reconciling import Hand, Part, ScriptedBackend, end_record, until, world

NO_LIMITS = {"queue": None, "start": None, "run": None, "idle": None, "hang": None}
A1, A2 = "rj-000000000000-a1", "rj-000000000000-a2"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_another_service_goes_on_with_the_jobs(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend(folders={A1: tmp_path / "jobs/rj-000000000000/attempt-1"})
        backend.folders[A1].mkdir(parents=True)
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit()
            await it.runs(job_id)
        hand.time += 100_000
        async with world(tmp_path, backend, hand, public_url="http://127.0.0.1:9") as it:
            assert (backend.folders[A1] / "service.json").read_text() == '{"url": "http://127.0.0.1:9"}\n'
            assert not await it.beat(job_id, "running")
            await asyncio.sleep(0.1)
            assert it.job(job_id).state is JobState.RUNNING
            assert (await it.finishes(job_id, 0)).state is JobState.SUCCEEDED
            assert backend.calls == [("provision", A1), ("destroy", A1)]

    run(test())


@pytest.mark.parametrize("code", [0, 9])
def test_a_job_that_ended_while_no_service_ran(code: int, tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend()
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit(timeouts=NO_LIMITS | {"run": 10})
            await it.runs(job_id)
        backend.parts[A1].end, backend.parts[A1].presence = end_record(job_id, code), Presence.ABSENT
        hand.time += 100_000
        async with world(tmp_path, backend, hand) as it:
            job = await it.ends(job_id)
            assert job.verdict is not None
            assert job.verdict.exit_code == code
            assert job.state is (JobState.SUCCEEDED if code == 0 else JobState.FAILED)

    run(test())


def test_a_new_service_waits_for_the_records_of_an_agent_that_it_has_not_heard_yet(tmp_path: Path) -> None:
    """The one before died after the end record was there and before the records were."""

    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend(remote=True)
        async with world(tmp_path, backend, hand) as it:
            job_id = await it.submit()
            await it.runs(job_id)
            await it.runner.end(job_id, end_record(job_id, 0))
            await it.reaches(job_id, JobState.COLLECTING)
        hand.time += 100.0
        async with world(tmp_path, backend, hand) as it:
            await asyncio.sleep(0.2)
            assert it.job(job_id).state is JobState.COLLECTING
            hand.time += 16.0  # nothing is heard of it
            assert (await it.ends(job_id)).state is JobState.SUCCEEDED
        assert [call for call in backend.calls if call[0] != "provision"] == [("destroy", A1)]

    run(test())


def test_killed_between_the_database_and_the_backend(tmp_path: Path) -> None:
    """PROVISIONING was written and nothing started; or it was started, and the service does not know."""

    async def test() -> None:
        backend = ScriptedBackend(hold=asyncio.Event())
        async with world(tmp_path, backend) as it:
            job_id = await it.submit()
            await until(lambda: ("provision", A1) in backend.calls)
        assert backend.parts == {}
        backend.hold = None
        async with world(tmp_path, backend) as it:
            await until(lambda: A1 in backend.parts)
        async with world(tmp_path, backend) as it:
            await until(lambda: backend.calls.count(("provision", A1)) == 3)
            await it.runs(job_id)
            assert list(backend.parts) == [A1]

    run(test())


def test_a_posted_end_record_is_kept_although_the_backend_has_no_disk(tmp_path: Path) -> None:
    async def test() -> None:
        backend = ScriptedBackend()
        async with world(tmp_path, backend) as it:
            job_id = await it.submit()
            await it.runs(job_id)
            await it.runner.close()
            await it.runner.end(job_id, end_record(job_id, 4))
        backend.parts.clear()
        async with world(tmp_path, backend) as it:
            job = await it.ends(job_id)
            assert job.verdict is not None
            assert job.verdict.exit_code == 4

    run(test())


def test_what_is_left_of_other_jobs_is_removed(tmp_path: Path) -> None:
    async def test() -> None:
        hand, backend = Hand(), ScriptedBackend()
        async with world(tmp_path, backend, hand) as it:
            over, alive = await it.submit(0), await it.submit(1)
            await it.runs(over)
            await it.runs(alive)
            backend.stuck = True
            await it.runner.end(over, end_record(over, 0))
            await it.reaches(over, JobState.CLEANING)
            hand.time += 121
            assert (await it.ends(over)).state is JobState.SUCCEEDED  # nothing changes a verdict
            assert [e["message"] for e in it.events(over) if e["type"] == "warning"] != []
        backend.stuck = False
        for name in ("rj-00000000dead-a1", "rj-000000000001-a7"):
            backend.parts[name] = Part(backend.parts[A1].spec)
        async with world(tmp_path, backend, hand) as it:
            await until(lambda: backend.parts["rj-00000000dead-a1"].presence is Presence.ABSENT)
            assert await backend.list_owned() == ["rj-000000000001-a1"]
            assert not await it.beat(alive, "running")

    run(test())


# Output that nobody shipped ---------------------------------------------------------------------------------------


def test_what_a_lost_agent_did_not_ship_is_read_from_its_files(tmp_path: Path) -> None:
    """From the stored byte on, cleaned and with secrets removed; the last line needs no line end."""

    async def test() -> None:
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "KEY").write_text("s3cret")
        hand, backend = Hand(), ScriptedBackend(folders={A1: tmp_path / "jobs/rj-000000000000/attempt-1"})
        folder = backend.folders[A1]

        def start(part: Part) -> None:
            (folder / "run/logs/node-1").mkdir(parents=True)
            (folder / "spec.json").write_text(part.spec.model_dump_json())
            (folder / "driver.log").write_bytes(b"one\ntwo s3cret\n\xff\x1b[31mthree")
            (folder / "run/logs/node-1/rank-5.log").write_bytes(b"\n" * 50_000 + b"end\n")
            (folder / "run/logs/node-1/rank-6.log").symlink_to("/etc/hostname")

        backend.on_start = start
        async with world(tmp_path, backend, hand, secrets_dir=tmp_path / "secrets") as it:
            job_id = await it.submit(secrets=["KEY"])
            await it.runs(job_id)
            chunk = {"source": "driver", "start": 0, "end": 4, "lines": ["one"], "offsets": [0]}
            await it.ships(job_id, chunk)
            backend.parts[A1].presence = Presence.ENDED
            await asyncio.sleep(0.05)
            hand.time += 6
            job = await it.ends(job_id)
            assert job.verdict is not None
            assert job.verdict.cause == "agent_lost"
            logs = [event for event in it.events(job_id) if event["type"] == "log"]
            driver = [(event["line"], event["src_off"]) for event in logs if event["source"] == "driver"]
            assert driver == [("one", 0), ("two ***", 4), ("\N{REPLACEMENT CHARACTER}three", 15)]
            rank = [event for event in logs if event["source"] == "node-1/rank-5"]
            assert len(rank) == 50_001
            assert (rank[-1]["line"], rank[-1]["src_off"], rank[-1]["rank"]) == ("end", 50_000, 5)
            assert len(logs) == 3 + 50_001
            assert not (folder / "spec.json").exists()

    run(test())
