"""Sends the lines of all sources to the service, each once: an offset that the service does not expect is refused."""

from __future__ import annotations

import logging
import threading
import time

from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import Redactor
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.outgoing import Outgoing
from corral.job.agent.output import output_files
from corral.job.agent.reach import Reach
from corral.job.protocol.agent import LogBatch, LogChunk, Watermarks

BATCH_LINES, BATCH_BYTES, BATCH_CHUNKS = 2000, 1 << 20, 64
LONGEST_BODY = 4 << 20  # the service's limit
LEAST_READ, MOST_READ = 1 << 14, 1 << 18  # bytes of one source at once; of all together about BATCH_BYTES
BUSY, QUIET = 0.05, 0.25  # seconds between looks at the files, just after there was output and later
_TOO_LARGE = 413
_REFUSED = frozenset({401, 403, 404, 410})  # the service does not want this job's output (any more)
REFUSALS = 3  # of them in a row until the rest is left to the service, once the command has ended

log = logging.getLogger(__name__)


class Shipper(threading.Thread):
    """Reads the files only as fast as the service stores, so its memory is that of a batch whatever is written.

    After anything but a plain answer it asks the service how far it is and goes on from there: what was stored although
    the answer was lost is not sent again.
    """

    def __init__(self, attempt: Attempt, redactor: Redactor, patience: float, reach: Reach | None = None) -> None:
        super().__init__(name="ship", daemon=True)
        self._attempt, self._redactor = attempt, redactor
        self._reach = reach or Reach()
        self.stored: dict[str, int] = {}  # source → bytes that the service said it has
        self._link = Link(attempt)
        self._awake = threading.Event()
        self._ending = False
        self._patience = patience
        self._heard = time.monotonic()
        self._sources: dict[str, Outgoing] = {}
        self._known: dict[str, int] | None = None  # watermarks; None: in doubt
        self._turn = 0
        self._size = BATCH_BYTES
        self._refusals = 0
        self.complete = False  # everything up to the end of all files is stored

    def finish(self) -> bool:
        """Send all there is, until the service stored nothing for `patience` seconds; whether it has everything."""
        self._heard = time.monotonic()
        self._ending = True
        self._awake.set()
        self.join()
        return self.complete

    def hurry(self, patience: float) -> None:
        """Have less patience. May be called at any time, and from a signal handler."""
        self._patience = min(self._patience, patience)

    def run(self) -> None:
        backoff = Backoff(self._awake)
        pause = BUSY
        while not self._given_up():
            self._awake.clear()
            last = self._ending  # before the look at the files, so that what is found then is all there is
            try:
                if self._known is None:
                    self._ask()
                if batch := self._next_batch(last):
                    self._send(batch)
                    pause = BUSY
                elif last:
                    self.complete = True
                    break
                else:
                    self._awake.wait(pause)
                    pause = min(2 * pause, QUIET)
            except Unanswered as problem:
                self._doubt(problem)
                backoff.wait()
            else:
                backoff.reset()
        self._link.close()

    def _given_up(self) -> bool:
        if not self._ending:
            return False
        return self._refusals >= REFUSALS or time.monotonic() - self._heard > self._patience

    # The files ------------------------------------------------------------------------------------------------------

    def _next_batch(self, last: bool) -> list[LogChunk]:
        """Chunks of as many sources as fit, beginning with another source each time, so that none waits for ever.

        last: files end where they end now, so what follows the last line end is a line too.
        """
        known = self._known or {}
        for file in output_files(self._attempt.driver_log, self._attempt.run):
            if file.source not in self._sources:
                self._sources[file.source] = Outgoing(file, known.get(file.source, 0), self._redactor)
        sources = list(self._sources.values())
        self._turn = (self._turn + 1) % len(sources)
        batch: list[LogChunk] = []
        lines, size = BATCH_LINES, self._size
        limit = max(LEAST_READ, min(MOST_READ, BATCH_BYTES // len(sources)))
        for source in sources[self._turn :] + sources[: self._turn]:
            if not source.fill(limit) and last:
                source.flush()
            if chunk := source.chunk(lines, size):
                batch.append(chunk)
                lines -= len(chunk.lines)
                size -= chunk.end - chunk.start
            if lines <= 0 or size <= 0 or len(batch) == BATCH_CHUNKS:
                break
        return batch

    # The service ----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        path = f"watermarks?attempt={self._attempt.spec.attempt}"
        self._known = self._watermarks(*self._link.call("GET", path))
        self.stored = dict(self._known)
        self._reach.answered("ship")
        log.info("the service has %s", self._known)
        for name, source in self._sources.items():
            source.restart(self._known.get(name, 0))

    def _send(self, batch: list[LogChunk]) -> None:
        body = LogBatch(attempt=self._attempt.spec.attempt, chunks=batch).model_dump_json().encode()
        if len(body) > LONGEST_BODY and self._smaller():
            return
        status, answer = self._link.call("POST", "logs", body)
        if status == _TOO_LARGE and self._smaller():
            return
        watermarks = self._watermarks(status, answer)
        for chunk in batch:
            if watermarks.get(chunk.source) != chunk.end:
                raise Unanswered(f"{chunk.source} is at {watermarks.get(chunk.source)}, not {chunk.end}", status)
            self._sources[chunk.source].stored(chunk.end)
            self.stored[chunk.source] = chunk.end
        self._heard, self._refusals = time.monotonic(), 0
        self._reach.answered("ship")

    def _smaller(self) -> bool:
        """Halve the batches; False when they cannot get smaller."""
        self._size //= 2
        return self._size > 0

    def _watermarks(self, status: int, body: bytes) -> dict[str, int]:
        if status != 200:
            raise Unanswered(f"status {status}", status)
        try:
            return Watermarks.model_validate_json(body).watermarks
        except ValueError:
            raise Unanswered("the answer holds no watermarks", status) from None

    def _doubt(self, problem: Unanswered) -> None:
        self._reach.failed("ship")
        if self._known is not None:
            log.warning("sending output: %s", problem)
        self._known = None
        self._refusals = self._refusals + 1 if problem.status in _REFUSED else 0
