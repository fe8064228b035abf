"""Logs of containers: lines with the time they were written, and whether more can come."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.job.backends.kube.http import Exchange

_LOOK = 0.02  # seconds between two looks at a followed log


@dataclass
class PodLog:
    """lines: with their line ends. over: the container has ended."""

    lines: list[tuple[datetime, bytes]] = field(default_factory=list)
    over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, text: str | bytes, at: datetime | None = None) -> None:
        data = text.encode() if isinstance(text, str) else text
        with self._lock:
            self.lines += [(at or datetime.now(UTC), line) for line in data.splitlines(keepends=True)]

    def end(self) -> None:
        self.over = True

    def part(self, query: Mapping[str, str], start: int = 0) -> tuple[bytes, int]:
        """What a request asks for of the lines from `start`, and where to go on."""
        lines = list(self.lines)
        shown = list(lines[start:])
        if since := query.get("sinceTime"):
            earliest = datetime.fromisoformat(since)
            shown = [(at, line) for at, line in shown if at >= earliest]
        if start == 0 and (tail := query.get("tailLines")):
            shown = shown[-int(tail) :] if int(tail) else []
        stamped = query.get("timestamps") == "true"
        return b"".join(_stamp(at) + line if stamped else line for at, line in shown), len(lines)


async def follow(log: PodLog, query: Mapping[str, str], exchange: Exchange) -> None:
    """Until the container has ended, the limit is reached or the client goes."""
    await exchange.begin("text/plain")
    closed = asyncio.ensure_future(exchange.reader.read(1))
    left = int(query.get("limitBytes", 1 << 62))
    position = 0
    try:
        while left > 0 and not closed.done():
            over = log.over
            data, position = log.part(query, position)
            await exchange.chunk(data[:left])
            left -= len(data)
            if over:
                break
            await asyncio.wait({closed}, timeout=_LOOK)
        await exchange.end()
    finally:
        closed.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await closed
        exchange.abort()


def _stamp(at: datetime) -> bytes:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode()
