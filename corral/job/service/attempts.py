"""Attempts at the backend: start them, look at them, collect what they wrote, remove them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.backends.base import Backend, Presence
from corral.job.core.admission import resources_of
from corral.job.core.classify import one_line
from corral.job.core.clock import Clock
from corral.job.core.machine import HOLDS_DEVICES
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord
from corral.job.protocol.states import JobState
from corral.job.service.drain import drain, shipped
from corral.job.service.journal import Journal
from corral.job.service.launch import agent_spec, placement_of, redactor_of
from corral.job.service.seen import Seen
from corral.job.service.settings import Settings
from corral.job.store.bundles import Bundles

OBSERVE_BOUND = 10.0  # seconds a backend has to say what it sees
AGENT_SILENCE = 15.0  # seconds without a heartbeat after which the service collects the logs itself
STOP_GRACE = 6.0  # seconds until all of a stopped attempt is killed; its agent kills the command after half of that
LISTEN = 5.0  # seconds between looks at a cluster for what an agent that is not heard says there
RECORDS_BOUND = 100.0  # seconds an agent has for them after the end; below the time limit of collecting
GIVE_UP = 900.0  # seconds of trying to start an attempt of a job that has no start limit

_SPEAKING = frozenset({Presence.ACTIVE, Presence.ENDED})
ON_NODES = frozenset({JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING})

log = logging.getLogger("corral.service.runner")


class Attempts:
    """One piece of work at a time for an attempt, each of which may be repeated at any time. changed: called when one
    is done."""

    def __init__(
        self,
        journal: Journal,
        backend: Backend,
        settings: Settings,
        clock: Clock,
        token_for: Callable[[str], str],
        changed: Callable[[], None],
    ) -> None:
        self._journal, self._backend, self._settings, self._clock = journal, backend, settings, clock
        self._token_for, self._changed = token_for, changed
        self._seen: dict[str, Seen] = {}
        self._bundles = Bundles(settings.data_dir)
        self._tasks: set[asyncio.Task[None]] = set()

    def seen(self, job: JobRecord) -> Seen:
        known = self._seen.get(job.job_id)
        if known is None or known.attempt != job.attempt:
            known = self._seen[job.job_id] = Seen(job.attempt, self._clock.now())
        return known

    def forget(self, job: JobRecord) -> None:
        self._seen.pop(job.job_id, None)

    async def close(self) -> None:
        """Leave all work where it is; it is idempotent, and the next service does it again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tell_address(self, jobs: Iterable[JobRecord]) -> None:
        """Tell the agents that are there where the service is now."""
        for job in jobs:
            if (folder := self._backend.attempt_dir(job.submission_id)) is not None:
                try:
                    await asyncio.to_thread(files.write_service, folder, self._settings.url)
                except InfraError as error:
                    log.warning("an agent is not told our address: %s", error, extra={"job": job.job_id})

    async def reap(self) -> None:
        """Remove what exists of attempts that are over, or that nobody knows."""
        try:
            owned = await self._backend.list_owned()
        except InfraError as error:
            log.warning("nobody knows what is left of earlier jobs: %s", error)
            return
        for submission_id in owned:
            if await self._wanted(submission_id):
                continue
            log.warning("removing what is left of %s", submission_id)
            try:
                await self._backend.destroy(submission_id)
            except InfraError as error:  # one that stays does not keep the others
                log.warning("not all that is left of %s is removed: %s", submission_id, error)

    async def _wanted(self, submission_id: str) -> bool:
        known = files.split(submission_id)
        if known is None:
            return False
        job = await self._journal.read(self._journal.store.get, known[0])
        return job is not None and job.state in HOLDS_DEVICES and job.submission_id == submission_id

    # Facts ----------------------------------------------------------------------------------------------------------

    async def look(self, job: JobRecord, seen: Seen) -> None:
        """Bring up to date what is seen of an attempt that the backend was asked to start."""
        if seen.end is None:
            seen.end = await self._end(job)
        if not seen.provisioned and (job.state is JobState.PROVISIONING or seen.work is not None):
            self._give_up(job, seen)
            await self._tell(job, seen, seen.trouble or "")
            return  # what is not there is on its way
        try:
            async with asyncio.timeout(OBSERVE_BOUND):
                observation = await self._backend.observe(job.submission_id)
        except (InfraError, TimeoutError) as error:
            log.warning("the backend does not answer: %s", error, extra={"job": job.job_id})
            seen.unanswered = str(error) or f"the backend did not answer within {OBSERVE_BOUND:g} s"
            await self._tell(job, seen, seen.unanswered)
            return
        seen.observe(observation, self._clock.now())
        await self._tell(job, seen, observation.message if observation.presence is Presence.STARTING else "")
        if seen.agent_gone and seen.end is None:
            seen.end = await self._end(job)  # it may have been written between the two looks

    async def _tell(self, job: JobRecord, seen: Seen, waits_for: str) -> None:
        """Nodes may be long in coming: whoever watches the job learns what is missing before the deadline quotes it."""
        if job.state is JobState.PROVISIONING and seen.news(waits_for, job.state_since, self._clock.now()):
            fields = {"phase": job.state.value, "message": one_line(waits_for, 300)}
            await self._journal.write(self._journal.store.append, job.job_id, "phase", fields, job.attempt)

    async def logs_complete(self, job: JobRecord, seen: Seen) -> bool:
        if seen.drained:
            return True
        if seen.end is None or self._sends_records(job, seen):
            return False
        return shipped(seen.end, await self._journal.read(self._journal.store.watermarks, job.job_id, job.attempt))

    def _sends_records(self, job: JobRecord, seen: Seen) -> bool:
        """Whether to wait for an agent that sends what its command left, which would be lost with its nodes; it ends
        when that is done."""
        if not self._backend.remote or seen.agent_gone:
            return False
        now, last_sign = self._clock.now(), max(seen.heard_at or 0.0, seen.since)  # since: this process may be new
        return now - last_sign <= AGENT_SILENCE and now - job.state_since <= RECORDS_BOUND

    async def keep_end(self, job: JobRecord, record: EndRecord) -> None:
        """Write a posted end record where one on disk is looked for. Raises InfraError."""
        folder = self._folder(job)
        if await asyncio.to_thread(files.read_end, folder, job.job_id, job.attempt) is None:
            await asyncio.to_thread(files.make, folder)
            await asyncio.to_thread(files.write_private, folder / files.END, record.model_dump_json() + "\n")
        if job.attempt == self.seen(job).attempt:
            self.seen(job).end = record

    async def _end(self, job: JobRecord) -> EndRecord | None:
        record = await asyncio.to_thread(files.read_end, self._folder(job), job.job_id, job.attempt)
        if record is not None:
            return record
        try:
            return await self._backend.end_record(job.submission_id)
        except InfraError as error:
            log.warning("no end record can be read: %s", error, extra={"job": job.job_id})
            return None

    def _give_up(self, job: JobRecord, seen: Seen) -> None:
        """What could not be started in the time it had for that is a failure of the infrastructure, not a time-out."""
        since = job.admitted if job.admitted is not None else job.state_since
        limit = job.request.timeouts.start or GIVE_UP
        if seen.work is None and seen.trouble is not None and seen.not_before >= since + limit:
            record = EndRecord(
                job_id=job.job_id,
                attempt=job.attempt,
                exit_code=None,
                failure=f"it could not be started within {limit:g} s: {seen.trouble}",
                kind="infra",
                started=since,
                ended=self._clock.now(),
            )
            seen.end = record.sealed()

    # Work -----------------------------------------------------------------------------------------------------------

    def work(self, job: JobRecord, seen: Seen) -> None:
        """Start what the job's state asks for, unless something is under way, done, or was tried a moment ago."""
        if seen.worked_for is not job.state:
            seen.worked_for = job.state
            seen.succeeded()  # what failed before is not wanted any more
        if seen.work is not None or self._clock.now() < seen.not_before:
            return
        if job.state is JobState.PROVISIONING and not seen.provisioned and seen.refused is None:
            self._begin(job, seen, self._provision(job, seen))
        elif job.state in ON_NODES and self._unheard(seen):
            self._begin(job, seen, self._listen(job, seen))
        elif job.state is JobState.COLLECTING and not seen.drained and self._collectable(job, seen):
            self._begin(job, seen, self._collect(job, seen))
        elif job.state is JobState.CLEANING and not seen.absent:
            self._begin(job, seen, self._clean(job, seen))

    def _collectable(self, job: JobRecord, seen: Seen) -> bool:
        """Whether there is something to do but wait for the agent."""
        if seen.end is None and not seen.stopped:
            return True
        last_sign = max(seen.heard_at or 0.0, seen.since, job.state_since)
        return seen.agent_gone or self._clock.now() - last_sign > AGENT_SILENCE

    def _unheard(self, seen: Seen) -> bool:
        """Whether it is time to look for what an agent that cannot reach us says at the cluster."""
        if not self._backend.remote or seen.observation is None or seen.observation.presence not in _SPEAKING:
            return False
        now, silent_since = self._clock.now(), max(seen.heard_at or 0.0, seen.since)
        return now - silent_since > AGENT_SILENCE - LISTEN and now - seen.listened_at > LISTEN

    def _begin(self, job: JobRecord, seen: Seen, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            problem: BaseException | None = (await asyncio.gather(work, return_exceptions=True))[0]
            seen.work = None
            if problem is None:
                seen.succeeded()
            else:
                seen.failed(" ".join(str(problem).split()), self._clock.now())
                known = isinstance(problem, InfraError | OSError)
                facts = {"job": job.job_id, "state": job.state.value}
                log.warning("tried again: %s", problem, exc_info=None if known else problem, extra=facts)
            self._changed()

        seen.work = asyncio.create_task(guarded(), name=f"{job.submission_id} {job.state.value}")
        self._tasks.add(seen.work)
        seen.work.add_done_callback(self._tasks.discard)

    async def _provision(self, job: JobRecord, seen: Seen) -> None:
        bundle = None if job.request.bundle is None else self._bundles.path(job.request.bundle)
        try:
            spec = await asyncio.to_thread(agent_spec, job, self._settings, self._token_for(job.job_id), bundle)
            resources = resources_of(job.request, self._settings.profile.devices_per_node)
            await self._backend.provision(spec, resources, placement_of(job.request))
        except ConfigError as error:
            seen.refused = str(error)
            return
        seen.provisioned = True

    async def _listen(self, job: JobRecord, seen: Seen) -> None:
        """The agent is not heard: what it says may be on record at the cluster."""
        seen.listened_at = self._clock.now()
        await self._drain(job, seen)

    async def _collect(self, job: JobRecord, seen: Seen) -> None:
        if seen.end is None and not seen.stopped:
            await self._backend.stop(job.submission_id, STOP_GRACE)
            seen.stopped = True
            return
        stored = await self._drain(job)
        seen.drained = True
        if stored:
            fields = {"message": f"the agent did not ship the last {stored} bytes of output; the service read them"}
            await self._journal.write(self._journal.store.append, job.job_id, "warning", fields, job.attempt)

    async def _clean(self, job: JobRecord, seen: Seen) -> None:
        if self._backend.remote:  # what it holds of the output goes with it
            with suppress(InfraError):
                await self._drain(job)
        await self._backend.destroy(job.submission_id)
        await self._store(job, final=True)  # nobody writes any more
        if (folder := self._backend.attempt_dir(job.submission_id)) is not None:
            await asyncio.to_thread(files.remove, folder / files.SPEC)  # it holds secrets, which nobody needs any more
        seen.absent = True

    async def _drain(self, job: JobRecord, seen: Seen | None = None) -> int:
        """Bring what the agent did not ship, and store it; how many bytes that was."""
        if self._backend.remote:
            watermarks = await self._journal.read(self._journal.store.watermarks, job.job_id, job.attempt)
            heard = await self._backend.fetch(job.submission_id, watermarks)
            if heard is not None and seen is not None and heard.attempt == job.attempt:
                seen.hear(heard, self._clock.now())
        return await self._store(job, final=False)

    async def _store(self, job: JobRecord, final: bool) -> int:
        folder = self._backend.attempt_dir(job.submission_id)
        if folder is None:
            return 0
        token = self._token_for(job.job_id)
        redactor = await asyncio.to_thread(redactor_of, job, folder, self._settings, token)
        return await drain(self._journal, job, folder, redactor, final)

    def _folder(self, job: JobRecord) -> Path:
        return files.attempt_folder(self._settings.data_dir, job.job_id, job.attempt)
