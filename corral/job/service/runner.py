"""What moves jobs on: again and again, for each job, look at the facts, decide, write it down, do what follows.

Everything is idempotent and starts from what is stored and what is there, so a service that was killed anywhere goes
on where it was: jobs run on without it, and their end records and logs wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from corral.job.backends.base import Backend
from corral.job.core.admission import admit, resources_of
from corral.job.core.clock import Clock
from corral.job.core.decide import Decision, decide
from corral.job.core.machine import HOLDS_DEVICES
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord, Heartbeat, Orders
from corral.job.protocol.states import JobState
from corral.job.service.attempts import Attempts
from corral.job.service.journal import Journal
from corral.job.service.seen import Seen
from corral.job.service.settings import Settings
from corral.job.store.errors import Stale

TICK = 0.25  # seconds between looks when nothing wakes us
REFRESH = 2.0  # seconds after which the list of jobs is read again although nobody said that it changed
REAP = 60.0  # seconds between looks for what is left of jobs that are over
BROKEN_PAUSE = 5.0  # seconds before a job is looked at again whose handling failed unexpectedly
AT_BACKEND = frozenset({JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING, JobState.COLLECTING})
WAITING = frozenset({JobState.ACCEPTED, JobState.QUEUED, JobState.RETRYING})
UNWANTED = frozenset({JobState.COLLECTING, JobState.CLEANING, JobState.RETRYING, JobState.QUEUED})

log = logging.getLogger("corral.service.runner")


class Runner:
    """token_for: the token of a job's agent. observe_change(before, after): called after each transition.

    All methods are for the event loop that `start` ran in.
    """

    def __init__(
        self,
        journal: Journal,
        backend: Backend,
        settings: Settings,
        clock: Clock,
        token_for: Callable[[str], str],
        *,
        observe_change: Callable[[JobRecord, JobRecord], None] = lambda before, after: None,
        tick: float = TICK,
    ) -> None:
        self.backend = backend
        self._journal, self._settings, self._clock = journal, settings, clock
        self._observe_change, self._tick_seconds = observe_change, tick
        self._attempts = Attempts(journal, backend, settings, clock, token_for, self._awake)
        self._jobs: dict[str, JobRecord] = {}
        self._broken: dict[str, float] = {}
        self._changed = self._room = True  # since the list was read; since the last admission
        self._refresh_at = self._soonest = self._waiting_at = float("-inf")
        self._reap_at = float("-inf")
        self._woken = asyncio.Event()
        self._started = clock.now()
        self._loop: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to move jobs; all that an earlier process left is adopted or removed from here on."""
        self._started = self._clock.now()
        await self._refresh()
        await self._attempts.tell_address(self._jobs.values())
        self._loop = asyncio.create_task(self._run(), name="runner")

    async def close(self) -> None:
        """Stop looking. Jobs run on; the next service takes them over."""
        tasks = [task for task in (self._loop, self._reaping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._attempts.close()

    def wake(self) -> None:
        """Something about jobs has changed: look now, and read all of them again."""
        self._changed = True
        self._awake()

    async def heartbeat(self, job_id: str, heard: Heartbeat) -> Orders:
        """An agent is alive; what it is to do. An agent of a job or attempt that is over is told to stop."""
        job = await self._journal.read(self._journal.store.get, job_id)
        if job is None or job.terminal or heard.attempt != job.attempt:
            return Orders(stop=True)
        if self._attempts.seen(job).hear(heard, self._clock.now()):
            self._awake()
        # Not at once when a cancel is asked for: the command's end would be on record before the verdict says why.
        return Orders(stop=job.state in UNWANTED)

    async def end(self, job_id: str, record: EndRecord) -> None:
        """A command is over. The record is kept on disk before this returns; that of another attempt is ignored.

        Raises InfraError when it cannot be kept.
        """
        job = await self._journal.read(self._journal.store.get, job_id)
        if job is None or job.terminal or (record.job_id, record.attempt) != (job_id, job.attempt):
            return
        if record.is_whole():
            await self._attempts.keep_end(job, record)
            self._awake()

    # The loop -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            (problem,) = await asyncio.gather(self._tick(), return_exceptions=True)
            if problem is not None:
                log.error("cannot look at the jobs", exc_info=problem)
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it may swallow a cancellation
                async with asyncio.timeout(self._tick_seconds):
                    await self._woken.wait()

    async def _tick(self) -> None:
        now = time.monotonic()
        if now >= (self._soonest if self._changed else self._refresh_at):
            await self._refresh()
        jobs = [job for job in self._due(now) if self._broken.get(job.job_id, 0.0) <= now]
        done = await asyncio.gather(*map(self._step, jobs), return_exceptions=True)
        for job, problem in zip(jobs, done, strict=True):
            if isinstance(problem, Stale):
                self.wake()
            elif problem is not None:
                self._broken[job.job_id] = now + BROKEN_PAUSE
                log.error("cannot handle a job", exc_info=problem, extra={"job": job.job_id})
        if self._room:
            self._room = False
            await self._admit()
        if now >= self._reap_at and (self._reaping is None or self._reaping.done()):
            self._reap_at = now + REAP
            self._reaping = asyncio.create_task(self._attempts.reap(), name="reaper")

    def _due(self, now: float) -> list[JobRecord]:
        """Of the many that wait, most have nothing to be done for them, and a tick is soon enough for the others."""
        due = [job for job in self._jobs.values() if job.state not in WAITING]
        if now >= self._waiting_at:
            self._waiting_at = now + self._tick_seconds
            waiting = [job for job in self._jobs.values() if job.state in WAITING]
            due += [job for job in waiting if self._decide(job, self._attempts.seen(job), False)]
        return due

    async def _step(self, job: JobRecord) -> None:
        seen = self._attempts.seen(job)
        if job.state in AT_BACKEND:
            await self._attempts.look(job, seen)
        complete = job.state is JobState.COLLECTING and await self._attempts.logs_complete(job, seen)
        if decision := self._decide(job, seen, complete):
            # What we hold may be older than a renewed lease or a cancel: decide on what is stored.
            fresh = await self._journal.read(self._journal.store.get, job.job_id)
            if fresh is None or fresh.version != job.version or fresh.state is not job.state:
                self.wake()
                return
            self._jobs[job.job_id] = fresh
            if decision := self._decide(fresh, seen, complete):
                await self._move(fresh, decision, seen)
                return
        self._attempts.work(job, seen)

    def _decide(self, job: JobRecord, seen: Seen, logs_complete: bool) -> Decision | None:
        return decide(job, seen.facts(self._started, logs_complete), self._clock.now())

    async def _move(self, job: JobRecord, decision: Decision, seen: Seen | None = None) -> JobRecord:
        """Raises Stale when the job was changed by someone else meanwhile."""
        store, observed = self._journal.store, seen.observation if seen else None
        if decision.warning is not None:
            fields = {"message": decision.warning}
            await self._journal.write(store.append, job.job_id, "warning", fields, job.attempt)
        after = await self._journal.write(
            store.transition,
            job,
            decision.to,
            message=decision.message,
            rayjob_status=observed.rayjob_status if observed else "",
            job_deployment_status=observed.job_deployment_status if observed else "",
            **decision.changes(job, self._clock.now()),
        )
        self._room = self._room or after.state not in HOLDS_DEVICES
        if after.terminal:
            self._jobs.pop(job.job_id, None)
            self._broken.pop(job.job_id, None)
            self._attempts.forget(job)
        else:
            self._jobs[job.job_id] = after
        facts = {"job": job.job_id, "attempt": job.attempt, "before": job.state.value, "after": after.state.value}
        log.info(decision.message, extra=facts)
        self._observe_change(job, after)
        self._awake()
        return after

    async def _admit(self) -> None:
        quota = self._settings.limits.active_devices_per_repository
        devices = self._settings.profile.devices_per_node
        for job in admit(self._jobs.values(), self.backend.capacity, quota, devices):
            asked = resources_of(job.request, devices)
            message = f"admitted with {asked.nodes} x {asked.accelerators_per_node} devices"
            try:
                await self._move(job, Decision(JobState.PROVISIONING, message))
            except Stale:
                self.wake()
                return

    async def _refresh(self) -> None:
        """Reading very many jobs takes its time, so that is never most of what we do."""
        begun = time.monotonic()
        self._changed, self._room, self._waiting_at = False, True, float("-inf")
        active = await self._journal.read(self._journal.store.active)
        self._jobs = {job.job_id: job for job in active}
        now = time.monotonic()
        self._refresh_at, self._soonest = now + REFRESH, now + 4 * (now - begun)

    def _awake(self) -> None:
        self._woken.set()
