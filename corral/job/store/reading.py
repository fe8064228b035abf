"""Events of a job as they are sent: log lines straight from the segments, everything else from the database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select

from corral.job.protocol.events import ALL_TYPES, encode_lines
from corral.job.protocol.states import TERMINAL, JobState
from corral.job.store.errors import UnknownJob
from corral.job.store.segments import Segments
from corral.job.store.tables import chunks, events, jobs

LOST = "[corral: this line was stored, and lost by the disk of the service]"
_BATCHES = (16, 64, 256)  # rows asked for at a time


@dataclass(frozen=True)
class Page:
    """data: whole events, one a line. next_seq: the cursor to go on from. done: `final` was read, or passed before."""

    data: bytes
    next_seq: int
    done: bool


@dataclass(frozen=True, slots=True)
class _Event:
    last_seq: int
    length: int
    line: bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    last_seq: int
    first_seq: int
    segment: int
    offset: int
    length: int
    attempt: int
    source: str
    node: int | None
    rank: int | None
    src_start: int
    ts: float


_HEAD = select(jobs.c.number, jobs.c.last_seq, jobs.c.state).where(jobs.c.job_id == bindparam("job_id"))
_EVENTS = (
    select(events.c.seq, events.c.line)
    .where(events.c.job == bindparam("number"), events.c.seq > bindparam("after"), events.c.seq <= bindparam("head"))
    .order_by(events.c.seq)
    .limit(bindparam("batch"))
)
_EVENTS_OF_TYPES = _EVENTS.where(events.c.type.in_(bindparam("types", expanding=True)))
_CHUNKS = (
    select(*(chunks.c[name] for name in _Chunk.__slots__))
    .where(
        chunks.c.job == bindparam("number"),
        chunks.c.last_seq > bindparam("after"),
        chunks.c.last_seq <= bindparam("head"),
    )
    .order_by(chunks.c.last_seq)
    .limit(bindparam("batch"))
)
_CHUNKS_OF_RANKS = _CHUNKS.where(chunks.c.rank.in_(bindparam("ranks", expanding=True)))


class Reader:
    """Reads one page: what to send is found in the database first, then fetched from the segments."""

    def __init__(self, connection: Connection, job_id: str, after_seq: int) -> None:
        """Raises UnknownJob. All up to the job's last event is there to be read, whatever is written meanwhile."""
        row = connection.execute(_HEAD, {"job_id": job_id}).one_or_none()
        if row is None:
            raise UnknownJob(job_id)
        self._connection = connection
        self.job_id = job_id
        self.after_seq = after_seq
        self.head: int = row.last_seq
        self.over = JobState(row.state) in TERMINAL
        self._where = {"number": row.number, "head": row.last_seq}

    def plan(
        self, types: frozenset[str], ranks: frozenset[int] | None, max_bytes: int
    ) -> tuple[list[_Event | _Chunk], int]:
        """What goes into the page, and the cursor after it: one item, and more as long as they fit."""
        taken: list[_Event | _Chunk] = []
        if self.after_seq >= self.head:
            return taken, self.after_seq
        size, last = 0, self.after_seq
        found: list[Iterator[_Event | _Chunk]] = [self._events(types), self._chunks(types, ranks)]
        for item in merge(*found, key=attrgetter("last_seq")):
            if taken and size + item.length > max_bytes:
                return taken, last
            taken.append(item)
            size, last = size + item.length, item.last_seq
        return taken, self.head

    def _events(self, types: frozenset[str]) -> Iterator[_Event]:
        wanted = types - {"log"}
        if not wanted:
            return
        every = wanted >= ALL_TYPES - {"log"}
        rows = self._rows(_EVENTS) if every else self._rows(_EVENTS_OF_TYPES, types=sorted(wanted))
        for seq, line in rows:
            yield _Event(seq, len(line), line)

    def _chunks(self, types: frozenset[str], ranks: frozenset[int] | None) -> Iterator[_Chunk]:
        if "log" not in types:
            return
        rows = self._rows(_CHUNKS) if ranks is None else self._rows(_CHUNKS_OF_RANKS, ranks=sorted(ranks))
        for row in rows:
            yield _Chunk(*row)

    def _rows(self, query: Select[Any], **more: Any) -> Iterator[Any]:
        after, turn = self.after_seq, 0
        while True:
            batch = _BATCHES[min(turn, len(_BATCHES) - 1)]
            found = self._connection.execute(query, self._where | more | {"after": after, "batch": batch}).all()
            yield from found
            if len(found) < batch:
                return
            after, turn = found[-1][0], turn + 1


def fetch(segments: Segments, job_id: str, items: list[_Event | _Chunk], after_seq: int) -> tuple[bytes, bool]:
    """The bytes of a plan, without lines up to after_seq; and whether any were damaged."""
    parts: list[bytes] = []
    damaged, at = False, 0
    while at < len(items):
        item = items[at]
        if isinstance(item, _Event):
            parts.append(item.line)
            at += 1
            continue
        run = _contiguous(items, at)
        at += len(run)
        data = segments.read(job_id, item.segment, item.offset, sum(chunk.length for chunk in run))
        if not _whole(run, data, item.offset):
            damaged = True
            data = b"".join(_mended(chunk, data[chunk.offset - item.offset :][: chunk.length]) for chunk in run)
        if item.first_seq <= after_seq:
            data = data[_after_lines(data, after_seq + 1 - item.first_seq) :]
        parts.append(data)
    return b"".join(parts), damaged


def first_seq(item: _Event | _Chunk) -> int:
    return item.last_seq if isinstance(item, _Event) else item.first_seq


def cut(data: bytes, max_bytes: int) -> tuple[bytes, int]:
    """The lines that fit, at least one; and how many lines there are."""
    end = data.rfind(b"\n", 0, max_bytes) + 1 or data.find(b"\n") + 1
    return data[:end], data.count(b"\n", 0, end)


def _contiguous(items: list[_Event | _Chunk], at: int) -> list[_Chunk]:
    run: list[_Chunk] = []
    for item in items[at:]:
        if isinstance(item, _Event):
            break
        if run and (item.segment, item.offset) != (run[-1].segment, run[-1].offset + run[-1].length):
            break
        run.append(item)
    return run


def _whole(run: list[_Chunk], data: bytes, start: int) -> bool:
    """Whether each chunk begins and ends as it was written: a damaged file ends too early, or holds zeros."""
    for chunk in run:
        first = chunk.offset - start
        last = first + chunk.length
        if not data.startswith(b'{"seq":%d,' % chunk.first_seq, first) or data[last - 2 : last] != b"}\n":
            return False
    return True


def _mended(chunk: _Chunk, data: bytes) -> bytes:
    """The chunk with a line in the place of each that is lost, so that every seq is there."""
    lines = data.splitlines(keepends=True)
    kept = b"".join(
        line
        for seq, line in enumerate(lines[: chunk.last_seq - chunk.first_seq + 1], chunk.first_seq)
        if line.startswith(b'{"seq":%d,' % seq) and line.endswith(b"}\n")
    )
    first = chunk.first_seq + kept.count(b"\n")
    count = chunk.last_seq - first + 1
    offsets = [chunk.src_start] * count
    lost = encode_lines(first, chunk.ts, chunk.attempt, chunk.source, chunk.node, chunk.rank, [LOST] * count, offsets)
    return kept + lost


def _after_lines(data: bytes, count: int) -> int:
    """Where the line after `count` lines begins."""
    at = 0
    for _ in range(count):
        at = data.index(b"\n", at) + 1
    return at
