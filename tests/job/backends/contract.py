"""What every backend has to do, whatever it runs jobs on. A backend's tests subclass BackendContract and give `place`.

Faults that need to know how a backend works (killing its processes) are in the backend's own tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Self

from corral.job.backends.base import Backend, Observation, Presence
from corral.job.protocol.agent import AgentSpec, EndRecord
from corral.job.protocol.submit import Resources

BOUND = 30.0  # seconds; generous, as the machine may be busy
ONE = Resources(nodes=1, accelerators_per_node=1, kind="cpu")
JOB = "rj-0123456789ab"


class Deaf(BaseHTTPRequestHandler):
    """A service that knows no job: an agent then leaves everything on the disk and ends."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


class DeafService:
    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Deaf)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True)
class Place:
    """make: a backend object as a service that was just started has it, over the same jobs as all others made here."""

    make: Callable[[], Backend]
    url: str
    folder: Path

    def spec(self, script: str, job_id: str = JOB, attempt: int = 1) -> AgentSpec:
        return AgentSpec(
            job_id=job_id,
            attempt=attempt,
            submission_id=f"{job_id}-a{attempt}",
            service_url=self.url,
            token="t" * 32,
            command=["bash", "-c", script],
            cwd=str(self.folder),
            nodes=1,
            devices_per_node=1,
        )


async def until(fact: Callable[[], Awaitable[bool]] | Callable[[], bool], bound: float = BOUND) -> None:
    """Return as soon as the fact holds; fail when it does not within the bound."""
    end = time.monotonic() + bound
    while True:
        held = fact()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


async def until_presence(backend: Backend, submission_id: str, *wanted: Presence) -> Observation:
    async def seen() -> bool:
        return (await backend.observe(submission_id)).presence in wanted

    await until(seen)
    return await backend.observe(submission_id)


async def ended(backend: Backend, submission_id: str) -> EndRecord:
    """The end record, once there is one."""
    found: list[EndRecord] = []

    async def written() -> bool:
        record = await backend.end_record(submission_id)
        found.extend([record] if record else [])
        return record is not None

    await until(written)
    return found[0]


class BackendContract:
    def test_from_absent_to_ended_to_absent(self, place: Place) -> None:
        """One start for two calls; the end record and what was written outlive everything."""
        starts = place.folder / "starts"
        spec = place.spec(
            f"echo began >> {starts}; echo hello; until test -e {place.folder}/go; do sleep 0.02; done; exit 3"
        )
        name = spec.submission_id

        async def life() -> None:
            backend = place.make()
            assert (await backend.observe(name)).presence is Presence.ABSENT
            assert await backend.list_owned() == []
            assert backend.attempt_dir(name) is None
            await asyncio.gather(backend.provision(spec, ONE), backend.provision(spec, ONE))
            assert (await backend.observe(name)).presence in (Presence.STARTING, Presence.ACTIVE)
            await until(starts.exists)
            await backend.provision(spec, ONE)
            assert (await backend.observe(name)).presence is Presence.ACTIVE
            assert await backend.list_owned() == [name]
            assert await backend.end_record(name) is None
            (place.folder / "go").touch()
            record = await ended(backend, name)
            assert (record.job_id, record.attempt, record.exit_code) == (JOB, 1, 3)
            over = await until_presence(backend, name, Presence.ENDED)
            assert over.exit_code in (3, None)
            await backend.destroy(name)
            await backend.destroy(name)
            assert (await backend.observe(name)).presence is Presence.ABSENT
            assert await backend.list_owned() == []
            assert await backend.end_record(name) == record
            await backend.provision(spec, ONE)  # late: from a service that was killed before it wrote down the end
            assert (await backend.observe(name)).presence is Presence.ABSENT
            assert starts.read_text() == "began\n"
            folder = backend.attempt_dir(name)
            assert folder is None or (folder / "driver.log").read_text() == "hello\n"

        asyncio.run(life())

    def test_stop_lets_the_command_finish_and_kills_it_when_it_does_not(self, place: Place) -> None:
        polite = place.spec(f"trap 'exit 5' TERM; touch {place.folder}/polite; while :; do sleep 0.02; done")
        stubborn = place.spec(
            f"trap '' TERM; touch {place.folder}/stubborn; while :; do sleep 0.02; done", job_id="rj-0123456789ac"
        )

        async def life() -> None:
            backend = place.make()
            await asyncio.gather(backend.provision(polite, ONE), backend.provision(stubborn, ONE))
            assert await backend.list_owned() == [polite.submission_id, stubborn.submission_id]
            await until(lambda: (place.folder / "polite").exists() and (place.folder / "stubborn").exists())
            for spec in (polite, stubborn):
                await backend.stop(spec.submission_id, 20.0)
                await backend.stop(spec.submission_id, 20.0)
            assert (await ended(backend, polite.submission_id)).exit_code == 5
            await until_presence(backend, stubborn.submission_id, Presence.ENDED)
            for spec in (polite, stubborn):
                await backend.destroy(spec.submission_id)
            assert await backend.list_owned() == []

        asyncio.run(life())

    def test_a_new_service_adopts_what_an_earlier_one_started(self, place: Place) -> None:
        spec = place.spec(f"touch {place.folder}/began; until test -e {place.folder}/go; do sleep 0.02; done; exit 4")

        async def first() -> None:
            await place.make().provision(spec, ONE)
            await until((place.folder / "began").exists)

        async def second() -> None:
            backend = place.make()
            assert await backend.list_owned() == [spec.submission_id]
            assert (await backend.observe(spec.submission_id)).presence is Presence.ACTIVE
            await backend.provision(spec, ONE)
            (place.folder / "go").touch()
            assert (await ended(backend, spec.submission_id)).exit_code == 4
            await until_presence(backend, spec.submission_id, Presence.ENDED)
            await backend.destroy(spec.submission_id)
            assert await place.make().list_owned() == []

        asyncio.run(first())
        asyncio.run(second())

    def test_destroy_ends_what_still_runs(self, place: Place) -> None:
        spec = place.spec(f"touch {place.folder}/began; while :; do sleep 0.02; done")

        async def life() -> None:
            backend = place.make()
            await backend.provision(spec, ONE)
            await until((place.folder / "began").exists)
            await backend.destroy(spec.submission_id)
            assert (await backend.observe(spec.submission_id)).presence is Presence.ABSENT
            assert await backend.list_owned() == []

        asyncio.run(life())

    def test_unknown_submissions_are_absent_and_may_be_stopped_and_destroyed(self, place: Place) -> None:
        async def life() -> None:
            backend = place.make()
            for name in ("rj-00000000000a-a1", "../../etc", ""):
                assert (await backend.observe(name)).presence is Presence.ABSENT
                await backend.stop(name, 1.0)
                await backend.destroy(name)
                assert await backend.end_record(name) is None
                assert backend.attempt_dir(name) is None

        asyncio.run(life())
