"""A runner over a real store and a scripted backend, with a clock that a test turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.errors import InfraError
from corral.job.backends.base import ANY, Capacity, Observation, Placement, Presence
from corral.job.core.clock import Clock
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import AgentSpec, EndRecord, Heartbeat, LogBatch
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import Resources, SubmitRequest
from corral.job.service.journal import Journal
from corral.job.service.runner import Runner
from corral.job.service.settings import Settings
from corral.job.store.store import Store

BOUND = 15.0  # seconds; generous, as the machine may be busy
STILL = 5.0  # seconds that the clock stands still after a turn


class Hand:
    """Time as a test tells it. What failed in the very moment of a turn is tried again at a time of its own, so the
    clock goes on by itself, and fast, when a test has waited for long."""

    def __init__(self) -> None:
        self._time, self._turned = 1_000_000.0, time.monotonic()

    @property
    def time(self) -> float:
        return self._time + 20 * max(0.0, time.monotonic() - self._turned - STILL)

    @time.setter
    def time(self, value: float) -> None:
        self._time, self._turned = value, time.monotonic()

    def clock(self) -> Clock:
        return Clock(lambda: self.time, lambda: self.time)


@dataclass
class Part:
    """What the scripted backend has of one submission."""

    spec: AgentSpec
    presence: Presence = Presence.ACTIVE
    end: EndRecord | None = None
    message: str = ""


@dataclass
class ScriptedBackend:
    """In memory. trouble: raised by provision. deaf: observe does not answer. stuck: destroy does not work. on_start:
    called with each new part. calls: (what, submission id) in order."""

    capacity: Capacity = field(default_factory=lambda: Capacity(8, 4, 8))
    name: str = "scripted"
    parts: dict[str, Part] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)
    trouble: Exception | None = None
    deaf: bool = False
    stuck: bool = False
    hold: asyncio.Event | None = None
    on_start: Callable[[Part], None] = lambda part: None

    remote: bool = False
    fetched: list[dict[str, int]] = field(default_factory=list)
    on_fetch: Callable[[str], Heartbeat | None] = lambda submission_id: None

    async def fetch(self, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        self.fetched.append(dict(watermarks))
        return self.on_fetch(submission_id)

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
        self.calls.append(("provision", spec.submission_id))
        if self.hold is not None:
            await self.hold.wait()
        if self.trouble is not None:
            raise self.trouble
        if spec.submission_id not in self.parts:
            self.parts[spec.submission_id] = Part(spec)
            self.on_start(self.parts[spec.submission_id])

    async def observe(self, submission_id: str) -> Observation:
        if self.deaf:
            raise InfraError("connection refused")
        part = self.parts.get(submission_id)
        return Observation(part.presence, part.message) if part else Observation(Presence.ABSENT)

    async def stop(self, submission_id: str, grace: float) -> None:
        self.calls.append(("stop", submission_id))

    async def destroy(self, submission_id: str) -> None:
        self.calls.append(("destroy", submission_id))
        if self.stuck:
            raise InfraError("a process does not die")
        if submission_id in self.parts:
            self.parts[submission_id].presence = Presence.ABSENT

    async def list_owned(self) -> list[str]:
        return sorted(name for name, part in self.parts.items() if part.presence is not Presence.ABSENT)

    async def end_record(self, submission_id: str) -> EndRecord | None:
        part = self.parts.get(submission_id)
        return part.end if part else None

    def attempt_dir(self, submission_id: str) -> Path | None:
        return self.folders.get(submission_id)


class World:
    """One service process, as far as jobs are concerned."""

    def __init__(self, data_dir: Path, backend: ScriptedBackend, hand: Hand, **settings: Any) -> None:
        self.hand, self.backend = hand, backend
        self.settings = Settings(data_dir=data_dir, source_roots={"/src": data_dir / "src"}, **settings)
        clock = hand.clock()
        self.store = Store(None, data_dir, clock)
        self.journal = Journal(self.store)
        self.changes: list[tuple[str, str, str]] = []
        self.runner = Runner(
            self.journal, backend, self.settings, clock, lambda job_id: "t" * 32, observe_change=self._noted, tick=0.01
        )

    def _noted(self, before: JobRecord, after: JobRecord) -> None:
        self.changes.append((after.job_id, before.state.value, after.state.value))

    async def submit(self, number: int = 0, **fields: Any) -> str:
        request = SubmitRequest.model_validate({"script": "/src/run.sh", "name_suffix": f"job-{number}", **fields})
        job_id = f"rj-{number:012x}"
        self.hand.time += 1  # who comes first is older
        await self.journal.write(self.store.create, request, key=job_id, owner="tests", job_id=job_id)
        self.runner.wake()
        return job_id

    def job(self, job_id: str) -> JobRecord:
        job = self.store.get(job_id)
        assert job is not None
        return job

    async def reaches(self, job_id: str, *states: JobState) -> JobRecord:
        await until(lambda: self.job(job_id).state in states, lambda: f"{job_id} is {self.job(job_id)}, not {states}")
        return self.job(job_id)

    async def ends(self, job_id: str) -> JobRecord:
        await until(lambda: self.job(job_id).terminal, lambda: f"{job_id} is {self.job(job_id)}")
        return self.job(job_id)

    async def beat(self, job_id: str, phase: str, attempt: int = 1, **fields: Any) -> bool:
        """A heartbeat of the agent; whether it is told to stop."""
        heartbeat = Heartbeat.model_validate({"attempt": attempt, "phase": phase, **fields})
        return (await self.runner.heartbeat(job_id, heartbeat)).stop

    async def runs(self, job_id: str, attempt: int = 1, **fields: Any) -> JobRecord:
        """Brings a submitted job to RUNNING."""
        await until(lambda: f"{job_id}-a{attempt}" in self.backend.parts, lambda: f"{job_id} is {self.job(job_id)}")
        await self.beat(job_id, "preflight", attempt)
        await self.beat(job_id, "running", attempt, **fields)
        return await self.reaches(job_id, JobState.RUNNING)

    async def finishes(self, job_id: str, code: int | None, attempt: int = 1, **fields: Any) -> JobRecord:
        await self.runner.end(job_id, end_record(job_id, code, attempt, **fields))
        return await self.ends(job_id)

    async def ships(self, job_id: str, chunk: dict[str, Any]) -> None:
        batch = LogBatch.model_validate({"attempt": 1, "chunks": [chunk]})
        await self.journal.write(self.store.append_logs, job_id, batch)

    async def cancels(self, job_id: str) -> None:
        await self.journal.write(self.store.request_cancel, job_id, "cancelled_by_user")
        self.runner.wake()

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """All that is stored of a job, in order."""
        types = frozenset({"log", "status", "phase", "warning", "final"})
        found: list[dict[str, Any]] = []
        cursor, more = 0, True
        while more:
            page = self.store.read(job_id, cursor, types=types, ranks=None)
            found += map(json.loads, page.data.splitlines())
            cursor, more = page.next_seq, bool(page.data)
        return found

    def states(self, job_id: str) -> list[str]:
        return [event["status"] for event in self.events(job_id) if event["type"] == "status"]


@asynccontextmanager
async def world(
    data_dir: Path, backend: ScriptedBackend, hand: Hand | None = None, **settings: Any
) -> AsyncIterator[World]:
    it = World(data_dir, backend, hand or Hand(), **settings)
    await it.runner.start()
    try:
        yield it
    finally:
        await it.runner.close()
        await it.journal.close()


def end_record(job_id: str, code: int | None, attempt: int = 1, **fields: Any) -> EndRecord:
    record = EndRecord(job_id=job_id, attempt=attempt, exit_code=code, started=1.0, ended=2.0, **fields)
    return record.sealed()


async def until(
    fact: Callable[[], bool] | Callable[[], Awaitable[bool]], what: Callable[[], str] = lambda: "it did not happen"
) -> None:
    end = time.monotonic() + BOUND
    while True:
        held = fact()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < end, what()
        await asyncio.sleep(0.005)
