"""Jobs on a Ray cluster that is there already, through its Jobs API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.backends.base import ANY, Capacity, Fate, Observation, Placement, Presence
from corral.job.backends.identity import service_id
from corral.job.backends.ray_jobs.api import JobsApi, RayJob
from corral.job.backends.ray_jobs.attempt import (
    SERVICE,
    STOP_SECONDS,
    Harvest,
    gate,
    observation_of,
    resource_of,
    submission_of,
)
from corral.job.backends.ray_jobs.doubts import Doubts
from corral.job.backends.ray_jobs.errors import HEAD_LOST, NOT_FOUND
from corral.job.backends.ray_jobs.note import Note, Stage, read_note, write_note
from corral.job.protocol.agent import AgentSpec, EndRecord, Heartbeat
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings

FRESH = 1.0  # seconds that an answer about a job is good for
LOOK_BOUND = 4.0  # seconds that an answer may take when all that is wanted is a look
LOOK = 2.0  # seconds between looks at a cluster that has not got the nodes for a job
STOP_LOOK = 0.25  # seconds between looks at a job that was told to stop
STOP_BOUND = STOP_SECONDS + 10.0  # seconds until one that does not is reported
REFUSED = Fate(Status.FAILED, "refused", FailureClass.CONFIG)

log = logging.getLogger("corral.service.ray")


class RayJobsBackend:
    """See backends.base.Backend. Raises ConfigError for settings that no cluster can be reached with."""

    name = "ray"
    remote = True

    def __init__(self, settings: Settings) -> None:
        self.capacity = Capacity(settings.devices, settings.max_nodes, settings.max_devices_per_node)
        self._settings = replace(settings, data_dir=settings.data_dir.resolve())
        self._data_dir = self._settings.data_dir
        self._service = service_id(self._data_dir)
        self._api = JobsApi(_address(settings.ray.address), token_of(settings.ray.token_file, "ray.token_file"))
        self._harvest = Harvest(self._data_dir, self._owns)
        self._doubts = Doubts(self._api)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._why: dict[str, str] = {}  # of those that wait
        self._refused: dict[str, str] = {}  # after they had waited
        self._seen: dict[str, tuple[float, RayJob | str | None]] = {}  # a string: why it is not known

    def refusal(self, resources: Resources, placement: Placement) -> str | None:
        asked = [name for name in ("cpu", "memory", "shm") if getattr(resources, name) is not None]
        asked += ["template_patches"] if placement.patches else []
        asked += ["image"] if placement.image else []
        if asked:
            what = "the nodes of a Ray cluster are as they are; leave it out, or use --backend kuberay"
            return f"{', '.join(asked)}: {what}"
        return None

    def manifest(self, submission_id: str, resources: Resources, placement: Placement) -> str | None:
        return None

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
        """A cluster without the nodes for it is waited for; `observe` says meanwhile what is missing."""
        self.capacity.check(resources)
        name = spec.submission_id
        folder = self._folder(name)
        if folder is None:
            raise ConfigError(f"{name!r} is not the id of a submission")
        async with self._locks[name]:
            note = read_note(folder)
            if name in self._waiting or (folder / files.END).exists():
                return
            if note is not None and note.stage is not Stage.SUBMITTING:
                return
            await asyncio.to_thread(files.write_spec, folder, spec)
            if note is None and (why := await self._missing(spec, resources, placement)) is not None:
                self._why[name] = why
                waiting = asyncio.create_task(self._wait(spec, resources, placement), name=f"nodes for {name}")
                self._waiting[name] = waiting
                waiting.add_done_callback(lambda done: self._no_longer(name, done))
                return
            await self._submit(spec, placement, folder)

    async def observe(self, submission_id: str) -> Observation:
        folder = self._folder(submission_id)
        if folder is None:
            return Observation(Presence.ABSENT)
        if submission_id in self._waiting:
            return Observation(Presence.STARTING, self._why[submission_id], None, "", "Initializing")
        if (refused := self._refused.get(submission_id)) is not None:
            return Observation(Presence.ABSENT, refused, fate=REFUSED)
        note = read_note(folder)
        if note is not None and note.stage is Stage.DESTROYED:
            return Observation(Presence.ABSENT)
        try:
            job = await self._job(submission_id)
        except InfraError:
            if (silent := self._doubts.silence(submission_id)) is None:
                raise
            return Observation(Presence.ENDED, silent, None, "RUNNING", "Failed", HEAD_LOST)
        if job is None:
            return await self._unknown(note)
        if not job.over and (lost := await self._doubts.node_lost(job)) is not None:
            return Observation(Presence.ENDED, lost, None, job.status, "Failed", HEAD_LOST, hearsay=True)
        if job.over and not await self._harvest.settled(self._api, submission_id):
            message = f"Ray says {job.status}; what its agent left in the log is being read"
            return Observation(Presence.ACTIVE, message, None, "RUNNING", "Running")
        return observation_of(job, self._harvest.output(submission_id))

    async def stop(self, submission_id: str, grace: float) -> None:
        """Ray's own grace is fixed when a job is submitted; an agent that is told to end needs less than `grace`."""
        if (folder := self._folder(submission_id)) is None:
            return
        if (waiting := self._waiting.get(submission_id)) is not None:
            async with self._locks[submission_id]:  # not while it is being given to Ray
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            if read_note(folder) is None:
                return
        if (job := await self._own(submission_id)) is not None and not job.over:
            await self._api.stop(submission_id)
            self._seen.pop(submission_id, None)

    async def destroy(self, submission_id: str) -> None:
        folder = self._folder(submission_id)
        if folder is None:
            return
        async with self._locks[submission_id]:
            if (waiting := self._waiting.get(submission_id)) is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            never_given = folder.is_dir() and read_note(folder) is None  # to Ray, which need not answer then
            if not never_given and (job := await self._own(submission_id)) is not None:
                await self._end(submission_id, job)
            await self._harvest.forget(submission_id)
            self._refused.pop(submission_id, None)
            self._doubts.heard(submission_id)
            if folder.is_dir():
                await asyncio.to_thread(write_note, folder, Note(Stage.DESTROYED))
            self._seen.pop(submission_id, None)
        self._locks.pop(submission_id, None)

    async def list_owned(self) -> list[str]:
        ours = {job.submission_id for job in await self._api.jobs() if self._owns(job)}
        return sorted({name for name in ours if files.split(name)} | self._waiting.keys())

    async def end_record(self, submission_id: str) -> EndRecord | None:
        record = await asyncio.to_thread(self._harvest.end_record, submission_id)
        folder = self._folder(submission_id)
        if record is not None or folder is None:
            return record
        note = read_note(folder)
        if note is None or note.stage is not Stage.SUBMITTED:
            return None
        job = await self._job(submission_id)
        if job is not None and job.over and await self._harvest.settled(self._api, submission_id):
            return self._harvest.end_record(submission_id)
        return None

    async def fetch(self, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        if submission_id in self._waiting:
            return None
        try:
            heard = await self._harvest.fetch(self._api, submission_id, watermarks)
        except InfraError:
            self._doubts.unheard(submission_id)
            raise
        self._doubts.heard(submission_id)
        return heard

    def attempt_dir(self, submission_id: str) -> Path | None:
        folder = self._folder(submission_id)
        return folder if folder is not None and folder.is_dir() else None

    # Starting -------------------------------------------------------------------------------------------------------

    async def _missing(self, spec: AgentSpec, resources: Resources, placement: Placement) -> str | None:
        nodes = await self._api.nodes()
        kind = resources.kind if resources.kind != "auto" else self._settings.profile.kind
        return gate(nodes, resources, placement, resource_of(kind, nodes))

    async def _wait(self, spec: AgentSpec, resources: Resources, placement: Placement) -> None:
        """Until the nodes are there and the job is submitted, or Ray refuses it."""
        name = spec.submission_id
        folder = self._folder(name)
        assert folder is not None
        while True:
            await asyncio.sleep(LOOK)
            try:
                why = await self._missing(spec, resources, placement)
                if why is None:
                    async with self._locks[name]:
                        await self._submit(spec, placement, folder)
                    return
                self._why[name] = why
            except InfraError as error:
                self._why[name] = str(error)
            except ConfigError as error:
                self._refused[name] = str(error)
                return

    def _no_longer(self, name: str, waiting: asyncio.Task[None]) -> None:
        self._waiting.pop(name, None)
        self._why.pop(name, None)
        if not waiting.cancelled() and (problem := waiting.exception()) is not None:
            log.error("%s cannot be submitted", name, exc_info=problem)

    async def _submit(self, spec: AgentSpec, placement: Placement, folder: Path) -> None:
        submission = submission_of(spec, self._settings, placement, owner=self._service)
        session = str((await self._api.version()).get("session_name") or "")
        await asyncio.to_thread(write_note, folder, Note(Stage.SUBMITTING, session))
        await self._api.submit(submission)
        await asyncio.to_thread(write_note, folder, Note(Stage.SUBMITTED, session))
        self._seen.pop(spec.submission_id, None)

    # Looking --------------------------------------------------------------------------------------------------------

    async def _job(self, submission_id: str) -> RayJob | None:
        """What Ray said of it a moment ago, or now. Looks are many: none may take long, nor be repeated at once."""
        at, job = self._seen.get(submission_id, (float("-inf"), None))
        if time.monotonic() - at > FRESH:
            try:
                async with asyncio.timeout(LOOK_BOUND):
                    job = await self._own(submission_id)
            except TimeoutError:
                job = f"Ray's dashboard at {self._api.address} did not answer within {LOOK_BOUND:g} s"
            except InfraError as error:
                job = str(error)
            self._seen[submission_id] = (time.monotonic(), job)
        if isinstance(job, str):
            raise InfraError(job)
        return job

    async def _own(self, submission_id: str) -> RayJob | None:
        job = await self._api.get(submission_id)
        return job if job is not None and self._owns(job) else None

    def _owns(self, job: RayJob) -> bool:
        return job.metadata.get(SERVICE) == self._service

    async def _unknown(self, note: Note | None) -> Observation:
        """Ray does not know the job."""
        if note is None:
            return Observation(Presence.ABSENT)
        if note.stage is Stage.SUBMITTING:
            return Observation(Presence.STARTING, "it is being given to Ray", None, "", "Initializing")
        session = str((await self._api.version()).get("session_name") or "")
        if note.session and session != note.session:
            why = "Ray's head was restarted, and knows nothing any more of the jobs it had"
            return Observation(Presence.ABSENT, why, fate=HEAD_LOST, hearsay=True)
        why = "Ray knows no such job any more: somebody deleted it there"
        return Observation(Presence.ABSENT, why, fate=NOT_FOUND, hearsay=True)

    # Ending ---------------------------------------------------------------------------------------------------------

    async def _end(self, submission_id: str, job: RayJob) -> None:
        """Stop it, take what is left of its output, delete it. Raises InfraError when it does not end."""
        until = time.monotonic() + STOP_BOUND
        told = False
        found: RayJob | None = job
        while found is not None and not found.over:
            if not told:
                await self._api.stop(submission_id)
                told = True
            if time.monotonic() > until:
                raise InfraError(f"{submission_id} does not end: Ray says {found.status} {STOP_BOUND:g} s after a stop")
            await asyncio.sleep(STOP_LOOK)
            found = await self._api.get(submission_id)
        if found is None:
            return
        try:
            await self._harvest.fetch(self._api, submission_id, {})
            await self._harvest.settled(self._api, submission_id)
        except InfraError as error:
            raise InfraError(f"{submission_id} is kept until its output is here: {error}") from error
        if not self._harvest.all_here(submission_id):
            raise InfraError(f"{submission_id} is kept until its output is here")
        await self._api.delete(submission_id)
        if await self._api.get(submission_id) is not None:
            raise InfraError(f"Ray still has {submission_id} after it was deleted")

    def _folder(self, submission_id: str) -> Path | None:
        known = files.split(submission_id)
        return files.attempt_folder(self._data_dir, *known) if known else None


def token_of(path: Path | None, setting: str) -> Callable[[], str] | None:
    """Reads the token anew each time, as it may be replaced. Raises ConfigError when there is none to read now."""

    def read() -> str:
        assert path is not None
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InfraError(f"{setting}: {path} cannot be read: {why}") from error
        if not token or not token.isascii() or not token.isprintable():
            raise InfraError(f"{setting}: {path} does not hold a token")
        return token

    if path is None:
        return None
    try:
        read()
    except InfraError as error:
        raise ConfigError(str(error)) from None
    return read


def _address(address: str | None) -> str:
    parts = urlsplit(address or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        wrong = f"{address!r} is not the URL of a Ray dashboard" if address else "which Ray cluster is not said"
        raise ConfigError(f"ray.address (--address): {wrong}; give its dashboard, like http://head:8265")
    assert address is not None
    return address
