"""Output that an agent did not live to ship: the service reads it from the raw files, with the agent's own rules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from corral.job.agent.lines import LineReader, Redactor
from corral.job.backends.folder import place, sources
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord, LogBatch, LogChunk
from corral.job.service.journal import Journal
from corral.job.store.errors import Ended, Misfit

BLOCK = 1 << 20  # bytes read at once
MOST_LINES = 20_000  # of one chunk
MOST_TEXT = 2 << 20  # characters of one chunk: escaped as JSON they stay below what a batch may have


def shipped(end: EndRecord, watermarks: dict[str, int]) -> bool:
    """Whether everything the agent saw written is stored."""
    return all(watermarks.get(source, 0) >= size for source, size in end.sources.items())


async def drain(journal: Journal, job: JobRecord, folder: Path, redactor: Redactor, final: bool) -> int:
    """Store what the raw files hold beyond the watermarks; how many bytes that was. Idempotent.

    final: nobody writes any more, so a last line without a line end is whole. Nothing is stored twice when an agent
    ships at the same time: whoever comes second does not fit, and this returns to be called again.
    Raises OSError when a file cannot be read.
    """
    watermarks = await journal.read(journal.store.watermarks, job.job_id, job.attempt)
    stored = 0
    for source, path in (await asyncio.to_thread(sources, folder)).items():
        start = watermarks.get(source, 0)
        with suppress(Misfit, Ended, FileNotFoundError):
            file = await asyncio.to_thread(_open, path)
            with file:
                if os.fstat(file.fileno()).st_size > start:
                    stored += await _drain_one(journal, job, source, file, LineReader(start, redactor), final)
    return stored


async def _drain_one(
    journal: Journal, job: JobRecord, source: str, file: BinaryIO, reader: LineReader, final: bool
) -> int:
    first = reader.end
    file.seek(first)
    more = True
    while more:
        start = reader.end
        data = await asyncio.to_thread(file.read, BLOCK)
        more = bool(data)
        if more:
            lines, offsets = await asyncio.to_thread(reader.feed, data)
        elif final:
            lines, offsets = reader.flush()
        else:
            break
        for chunk in _chunks(source, lines, offsets, start, reader.end):
            batch = LogBatch(attempt=job.attempt, chunks=[chunk])
            await journal.write(journal.store.append_logs, job.job_id, batch)
    return reader.end - first


def _chunks(source: str, lines: list[str], offsets: list[int], start: int, end: int) -> Iterator[LogChunk]:
    node, rank = place(source)
    at = 0
    while at < len(lines):
        last, size = at, 0
        while last < len(lines) and last - at < MOST_LINES and (size := size + len(lines[last])) <= MOST_TEXT:
            last += 1
        last = max(last, at + 1)
        upto = offsets[last] if last < len(lines) else end
        yield LogChunk(
            source=source, node=node, rank=rank, start=start, end=upto, lines=lines[at:last], offsets=offsets[at:last]
        )
        at, start = last, upto


def _open(path: Path) -> BinaryIO:
    """A job may have put anything there: links are not followed, and a pipe does not block."""
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)
