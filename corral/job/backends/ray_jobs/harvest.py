"""What agents say in the logs of their Ray jobs, brought to the service's disk.

An agent that cannot reach the service puts its output, its heartbeats and its end record into frames (see
protocol.frames) of its own output, which Ray keeps. Everything here may be done again at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from corral.errors import InfraError
from corral.job.backends import folder as files
from corral.job.backends.ray_jobs.api import JobsApi, RayJob
from corral.job.backends.ray_jobs.raw import RawFiles
from corral.job.backends.ray_jobs.tail import Tail
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.frames import MARK, Bytes, parse

IDLE = 2.5  # seconds without news after which a log that grows was read to its present end: Ray looks every 1 to 2 s
FETCH_BOUND = 20.0  # seconds that one fetch may take; what is not there by then comes with the next one
SETTLE_BOUND = 3.0  # seconds that one look waits for the log of a job that is over
GIVE_UP = 60.0  # seconds without a new character of the log of a job that is over
FOLLOW = 60.0  # seconds that a log is followed after it was last asked for
CHECK = 0.2  # seconds between looks whether all of the output is here
PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between readings
NONCE = "# "  # a comment at the end of the entrypoint, which tells this start of it from all others
WORDS = 20  # last lines of output that are kept for messages
LONGEST_WORD = 500  # characters of each

log = logging.getLogger("corral.service.ray")


class Harvest:
    """Of all attempts of a service. Its data folder holds one folder for each. owns: whether a Ray job is one of its
    own; the log of another one is not read."""

    def __init__(self, data_dir: Path, owns: Callable[[RayJob], bool] = lambda job: True) -> None:
        self._data_dir, self._owns = data_dir, owns
        self._logs: dict[str, _Log] = {}
        self._watermarks: dict[str, Mapping[str, int]] = {}  # as last told, which may be before a log can be read

    async def fetch(self, api: JobsApi, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        """See Backend.fetch. Raises InfraError."""
        if watermarks:
            self._watermarks[submission_id] = dict(watermarks)
        job = await api.get(submission_id)
        its = await self._log(api, submission_id, job)
        if job is None or its is None:
            return None
        its.stored(self._watermarks.get(submission_id, {}))
        if job.over:
            await its.finish(FETCH_BOUND, complete=True)
        else:
            await its.catch_up(FETCH_BOUND)
        return its.news()

    async def settled(self, api: JobsApi, submission_id: str) -> bool:
        """Of a job that is over: whether all is known that its log says about its end. The end record is on disk then,
        when there is one. Returns after SETTLE_BOUND at the latest. Raises InfraError when the disk refuses."""
        if self.end_record(submission_id) is not None:
            return True
        if (its := await self._log(api, submission_id)) is None:
            return True
        return await its.finish(SETTLE_BOUND, complete=False)

    def end_record(self, submission_id: str) -> EndRecord | None:
        """The one on disk."""
        known = files.split(submission_id)
        return files.read_end(files.attempt_folder(self._data_dir, *known), *known) if known else None

    def output(self, submission_id: str) -> list[str] | None:
        """The last lines that the agent printed and that are no frames, as far as they were read; None when the log
        cannot be read."""
        its = self._logs.get(submission_id)
        return None if its is None else its.output()

    def all_here(self, submission_id: str) -> bool:
        """Of a job that is over, after a fetch: whether its log may be deleted, as far as it can be read at all."""
        its = self._logs.get(submission_id)
        return its is None or its.all_here()

    async def forget(self, submission_id: str) -> None:
        """Nothing more is wanted of its log."""
        self._watermarks.pop(submission_id, None)
        if (its := self._logs.pop(submission_id, None)) is not None:
            await its.close()

    async def _log(self, api: JobsApi, submission_id: str, job: RayJob | None = None) -> _Log | None:
        """None for a submission that has no folder here, or no job of ours there."""
        known = files.split(submission_id)
        if known is None:
            return None
        folder = files.attempt_folder(self._data_dir, *known)
        its = self._logs.get(submission_id)
        if its is not None and its.api is api:
            return its
        job = job or await api.get(submission_id)
        if job is None or not self._owns(job) or not folder.is_dir():
            return None
        if its is not None:
            await its.close()
        its = self._logs[submission_id] = _Log(api, job, folder, *known)
        return its


class _Log:
    """The log of one submission: followed while its job runs and somebody asks, read to its end when that is over."""

    def __init__(self, api: JobsApi, job: RayJob, folder: Path, job_id: str, attempt: int) -> None:
        self.api, self._submission_id, self._folder = api, job.submission_id, folder
        self._job_id, self._attempt = job_id, attempt
        self._entrypoint = job.entrypoint if NONCE in job.entrypoint else None
        self._begun = self._entrypoint is None
        self._words: deque[str] = deque(maxlen=WORDS)
        self._raw = RawFiles(folder)
        self._tail = Tail(api, job.submission_id, self._take, self._restart)
        self._end: EndRecord | None = None
        self._heard: Heartbeat | None = None
        self._news = False
        self._beats = self._most_beats = 0  # heartbeats of this reading, and of the longest one
        self._task: asyncio.Task[None] | None = None
        self._asking = False  # for all of the log at once, which takes its time
        self._finishing = False
        self._finished = False  # its job is over, and it was read to its end
        self._lost = False  # the same, but it could not be read
        self._moved_at = self._checked_at = 0.0
        self._asked_at = 0.0
        self._trouble: BaseException | None = None
        self._limit: asyncio.Timeout | None = None  # of the socket that is open

    def stored(self, watermarks: Mapping[str, int]) -> None:
        """Raises InfraError when the disk refuses."""
        try:
            self._raw.stored(watermarks)
        except OSError as error:
            raise _disk(error) from error
        if self._raw.dropped:
            self._raw.dropped = False
            self._finished = False
            self._tail.start_over()

    def news(self) -> Heartbeat | None:
        """The newest heartbeat, once."""
        heard = self._heard if self._news else None
        self._news = False
        return heard

    async def catch_up(self, bound: float) -> None:
        """Read a log that may still grow up to its present end. Raises InfraError when it cannot be read."""
        self._asked_at = asked = time.monotonic()
        self._trouble = None
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + FOLLOW)
        if self._task is None or self._task.done():
            self._moved_at = asked
            self._task = asyncio.create_task(self._follow(), name=f"log of {self._submission_id}")
        while time.monotonic() - asked < bound:
            if not self._asking and time.monotonic() - max(self._moved_at, asked) > IDLE:
                break
            await asyncio.wait({self._task}, timeout=0.1)
            if self._task.done() or self._trouble is not None:
                break
        self._raise_trouble()

    async def finish(self, bound: float, *, complete: bool) -> bool:
        """Read the log of a job that is over to its end; whether that is done. complete: with all of the output, not
        just the end record. Raises InfraError when the disk refuses."""
        if self._finished or self._lost or (self._end is not None and not complete):
            return True
        if self._task is None or not self._finishing or self._task.done():
            await self._cancel()
            self._finishing, self._trouble = True, None
            self._task = asyncio.create_task(self._read_out(), name=f"log of {self._submission_id}")
        until = time.monotonic() + bound
        while not self._task.done() and time.monotonic() < until:
            await asyncio.wait({self._task}, timeout=0.05)
            if self._end is not None and not complete:
                return True
        self._raise_trouble()
        return self._task.done()

    def output(self) -> list[str] | None:
        return None if self._lost or not self._tail.taken else [*self._words]

    def all_here(self) -> bool:
        return self._finished or self._lost

    async def close(self) -> None:
        await self._cancel()

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    # Reading --------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        pause = PAUSE
        while time.monotonic() - self._asked_at < FOLLOW:
            try:
                before = self._tail.taken
                await self._follow_once()
                if self._tail.taken == before:  # a line that is too long for the socket holds up all of it
                    await self._all_at_once()
                pause = PAUSE if self._tail.taken > before else min(2 * pause, LONGEST_PAUSE)
            except (InfraError, OSError) as error:
                self._trouble = error if isinstance(error, InfraError) else _disk(error)
                pause = min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _follow_once(self) -> None:
        """Until the socket ends, or for so long as somebody asks."""
        try:
            async with asyncio.timeout(FOLLOW) as self._limit:
                await self._tail.once(self._moved)
        except TimeoutError:
            return
        finally:
            self._limit = None

    async def _all_at_once(self) -> None:
        self._asking = True
        try:
            await self._tail.whole()
        finally:
            self._asking = False
            self._moved()

    async def _read_out(self) -> None:
        """A reading that ended is believed to have been to the end when the frames say so, when it was one answer, or
        when two of them came to the same length."""
        before = -1
        self._moved_at = time.monotonic()
        try:
            while not self._finished and not self._lost:
                length = await self._tail.once(self._has_all)
                self._finished = self._complete() or 0 < length == before == self._tail.taken
                if not self._finished:
                    with contextlib.suppress(InfraError):
                        await self._tail.whole()
                        self._finished = True
                before = length
                self._lost = not self._finished and time.monotonic() - self._moved_at > GIVE_UP
                if not self._finished:
                    await asyncio.sleep(PAUSE)
        except (InfraError, OSError) as error:
            self._trouble = error if isinstance(error, InfraError) else _disk(error)
            return
        if self._lost:
            log.warning("the log of %s cannot be read", self._submission_id)
        if last := self._tail.last_line():
            self._take(last)

    def _moved(self) -> bool:
        self._moved_at = time.monotonic()
        return time.monotonic() - self._asked_at > FOLLOW

    def _has_all(self) -> bool:
        """A look at all sources, of which there may be thousands, is for now and then."""
        self._moved_at = now = time.monotonic()
        if now - self._checked_at < CHECK:
            return False
        self._checked_at = now
        return self._complete()

    def _complete(self) -> bool:
        return self._end is not None and self._raw.covers(self._end.sources)

    # Lines ----------------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._begun = self._entrypoint is None
        self._beats = 0
        self._words.clear()

    def _take(self, line: str) -> None:
        """Raises OSError and InfraError when the disk refuses."""
        if not self._begun:
            self._begun = self._entrypoint is not None and line.endswith(self._entrypoint)
            return
        said = parse(line)
        if isinstance(said, Bytes):
            self._raw.put(said)
        elif isinstance(said, Heartbeat):
            if said.attempt == self._attempt:
                self._beats += 1
                if self._beats > self._most_beats:  # else it was read before
                    self._heard, self._news, self._most_beats = said, True, self._beats
        elif isinstance(said, EndRecord):
            if (said.job_id, said.attempt) == (self._job_id, self._attempt):
                self._keep(said)
        elif line.strip() and not line.startswith(MARK):
            self._words.append(line.strip()[:LONGEST_WORD])

    def _keep(self, record: EndRecord) -> None:
        if files.read_end(self._folder, self._job_id, self._attempt) is None:
            files.write_private(self._folder / files.END, record.model_dump_json() + "\n")
        self._end = record


def _disk(error: OSError) -> InfraError:
    return InfraError(f"what an agent said cannot be kept: {error.strerror or error}; make room in the data folder")
