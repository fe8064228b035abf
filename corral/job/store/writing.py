"""Appending to a job inside one transaction: numbers, events, and log lines into the segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from corral.errors import ConfigError
from corral.job.protocol.agent import LogBatch, LogChunk
from corral.job.protocol.events import EventType, encode, encode_lines
from corral.job.protocol.states import TERMINAL, JobState
from corral.job.store.errors import Ended, Misfit, UnknownJob
from corral.job.store.segments import Place, Segments
from corral.job.store.tables import chunks, events, jobs, sources

PIECE = 256 << 10  # bytes that one row of the index points to, unless a single line is longer

_COLUMNS = ("number", "state", "attempt", "last_seq", "segment", "segment_end", "log_bytes", "capped")
_LOCK = select(*(jobs.c[name] for name in _COLUMNS)).where(jobs.c.job_id == bindparam("id")).with_for_update()
_ADVANCE = (
    update(jobs)
    .where(jobs.c.number == bindparam("at"))
    .values({name: bindparam(name) for name in ("last_seq", "segment", "segment_end", "log_bytes", "capped")})
)
_MARKS = select(sources.c.source, sources.c.watermark).where(
    sources.c.job == bindparam("number"), sources.c.attempt == bindparam("attempt")
)
_MOVE_MARK = (
    update(sources)
    .where(
        sources.c.job == bindparam("at"),
        sources.c.attempt == bindparam("of"),
        sources.c.source == bindparam("from"),
    )
    .values(watermark=bindparam("to"))
)


class Appender:
    """Holds the job's row against other writers until the transaction ends; `close` before that, if all went well.

    Raises UnknownJob, and Ended for a job that is over.
    """

    def __init__(self, connection: Connection, segments: Segments, job_id: str, now: float) -> None:
        row = connection.execute(_LOCK, {"id": job_id}).one_or_none()
        if row is None:
            raise UnknownJob(job_id)
        if JobState(row.state) in TERMINAL:
            raise Ended(f"job {job_id} is over ({row.state}); nothing more is stored of it")
        self._connection = connection
        self._segments = segments
        self._job_id = job_id
        self._now = now
        self._number: int = row.number
        self._place = Place(row.segment, row.segment_end)
        self._log_bytes: int = row.log_bytes
        self._capped: int = row.capped
        self._rows: list[dict[str, Any]] = []
        self.attempt: int = row.attempt
        self.last_seq: int = row.last_seq

    def event(self, kind: EventType, fields: dict[str, Any], attempt: int) -> int:
        """Append one event that is no log line; its seq."""
        self.last_seq += 1
        line = encode(self.last_seq, self._now, attempt, kind, fields)
        row = {"job": self._number, "seq": self.last_seq, "type": kind, "line": line}
        self._connection.execute(insert(events), row)
        return self.last_seq

    def logs(self, batch: LogBatch, cap: int | None) -> dict[str, int]:
        """Append the lines that are not stored yet; the watermarks after them. Raises Misfit, ConfigError."""
        if batch.attempt > self.attempt:
            raise ConfigError(
                f"job {self._job_id} has had {self.attempt} attempts, and none with number {batch.attempt}"
            )
        before = watermarks(self._connection, self._number, batch.attempt)
        marks = dict(before)
        for chunk in _fresh(batch, marks):
            if chunk.lines and self._capped != batch.attempt:
                self._store(chunk, batch.attempt, cap)
            marks[chunk.source] = chunk.end
        self._move_marks(batch.attempt, before, marks)
        return marks

    def recover(self) -> None:
        """Cut off what a killed service wrote and never indexed; say what the disk lost."""
        if self._segments.drop_unindexed(self._job_id, self._place.segment) or self._place.end:
            self._make_ready()

    def close(self) -> None:
        """Write what the appends have changed of the job's row and index."""
        if self._rows:
            self._connection.execute(insert(chunks), self._rows)
        values = {
            "last_seq": self.last_seq,
            "segment": self._place.segment,
            "segment_end": self._place.end,
            "log_bytes": self._log_bytes,
            "capped": self._capped,
        }
        self._connection.execute(_ADVANCE, {"at": self._number, **values})

    def _store(self, chunk: LogChunk, attempt: int, cap: int | None) -> None:
        first = self.last_seq + 1
        data = encode_lines(first, self._now, attempt, chunk.source, chunk.node, chunk.rank, chunk.lines, chunk.offsets)
        starts = chunk.offsets
        done = 0  # lines
        for piece, count in _pieces(data, len(chunk.lines)):
            if cap is not None and self._log_bytes + len(piece) > cap:
                self._capped = attempt
                message = f"stored output has reached its limit of {cap} bytes; the rest is only in the raw files"
                self.event("warning", {"message": message}, attempt)
                return
            self._make_ready()
            start = chunk.start if done == 0 else starts[done]
            done += count
            row = {
                "job": self._number,
                "last_seq": self.last_seq + count,
                "first_seq": self.last_seq + 1,
                "attempt": attempt,
                "source": chunk.source,
                "node": chunk.node,
                "rank": chunk.rank,
                "segment": self._place.segment,
                "offset": self._place.end,
                "length": len(piece),
                "src_start": start,
                "src_end": chunk.end if done == len(starts) else starts[done],
                "ts": self._now,
            }
            self._rows.append(row)
            self._place = self._segments.write(self._job_id, self._place, piece)
            self._log_bytes += len(piece)
            self.last_seq += count

    def _make_ready(self) -> None:
        segment = self._place.segment
        self._place = self._segments.ready(self._job_id, segment, self._place.end)
        if self._place.missing:
            message = (
                f"{self._place.missing} bytes of stored output (segment {segment}) were lost by the service's disk; "
                "the lines in them are shown as lost, the raw files of the attempt still have them"
            )
            self.event("warning", {"message": message}, self.attempt)

    def _move_marks(self, attempt: int, before: dict[str, int], marks: dict[str, int]) -> None:
        moved = [source for source, end in marks.items() if before.get(source) != end]
        if known := [source for source in moved if source in before]:
            keys = {"at": self._number, "of": attempt}
            self._connection.execute(_MOVE_MARK, [keys | {"from": source, "to": marks[source]} for source in known])
        if new := [source for source in moved if source not in before]:
            keys = {"job": self._number, "attempt": attempt}
            rows = [keys | {"source": source, "watermark": marks[source]} for source in new]
            self._connection.execute(insert(sources), rows)


def watermarks(connection: Connection, number: int, attempt: int) -> dict[str, int]:
    found = connection.execute(_MARKS, {"number": number, "attempt": attempt})
    return dict(found.all())


def _fresh(batch: LogBatch, stored: dict[str, int]) -> list[LogChunk]:
    """The chunks that are not stored yet. Raises Misfit; nothing has been written then."""
    marks = dict(stored)
    fresh = []
    for chunk in batch.chunks:
        mark = marks.get(chunk.source, 0)
        if chunk.end <= mark:
            continue
        if chunk.start != mark:
            raise Misfit(stored)
        marks[chunk.source] = chunk.end
        fresh.append(chunk)
    return fresh


def _pieces(data: bytes, lines: int) -> Iterator[tuple[bytes, int]]:
    """The encoded lines in pieces of whole lines, each with their number."""
    if len(data) <= PIECE:
        yield data, lines
        return
    at = 0
    while at < len(data):
        end = data.rfind(b"\n", at, at + PIECE) + 1 or data.find(b"\n", at) + 1
        yield data[at:end], data.count(b"\n", at, end)
        at = end
