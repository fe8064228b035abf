"""A watch: what changed, bookmarks, and the faults that a stream can have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.job.backends.kube.faults import STREAM, Fault, Faults
from tests.job.backends.kube.http import Exchange
from tests.job.backends.kube.selectors import Matches
from tests.job.backends.kube.store import Kind, Object, Refused, Store

_HELD = 0.05  # seconds a reordered event waits for the one it lets pass


class _Over(Exception):
    """Nothing more is to be sent."""


@dataclass
class Watch:
    """cursor: version up to which the client knows everything. seconds: until the server ends it. bookmarks: seconds
    between two, None when they are not asked for."""

    store: Store
    faults: Faults
    exchange: Exchange
    kind: Kind
    namespace: str | None
    matches: Matches
    cursor: int
    seconds: float
    bookmarks: float | None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _held: bytes | None = None
    _closed: asyncio.Future[bytes] | None = None

    async def run(self, first: Iterable[Object]) -> None:
        """Until its time is over, a fault ends it or the client goes. first: shown as added before all else."""
        await self.exchange.begin("application/json")
        # A client that watches sends nothing more.
        closed = self._closed = asyncio.ensure_future(self.exchange.reader.read(1))
        try:
            for thing in first:
                await self._event("ADDED", thing)
            await self._until_over(closed)
            await self._flush()
            await self.exchange.end()
        except _Over:
            pass
        finally:
            closed.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await closed
            self.exchange.abort()

    async def _until_over(self, closed: asyncio.Future[bytes]) -> None:
        ends = time.monotonic() + self.seconds
        bookmark_at = time.monotonic() + self.bookmarks if self.bookmarks is not None else float("inf")
        while (now := time.monotonic()) < ends:
            self.wake.clear()
            for fault in self.faults.take(
                {"gone", "cut", "freeze", "end"}, "watch", self.kind.plural, "", only_due=True
            ):
                await self._break(fault, b'{"type":"BOOKMARK","object":{"kind":"RayJob"}}')
            await self._news()
            if now >= bookmark_at:
                await self._bookmark()
                bookmark_at = now + (self.bookmarks or 0.0)
            left = min(ends, bookmark_at, now + _HELD if self._held else ends) - time.monotonic()
            woken: asyncio.Future[Any] = asyncio.ensure_future(self.wake.wait())
            try:
                await asyncio.wait((woken, closed), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            if closed.done():
                raise _Over
            if not self.wake.is_set():
                await self._flush()
        if self.bookmarks is not None:
            await self._bookmark()

    async def _news(self) -> None:
        up_to = self.store.version
        try:
            for shown, thing in self.store.since(self.cursor, self.kind, self.namespace, self.matches):
                await self._event(shown, thing)
                self.cursor = int(thing["metadata"]["resourceVersion"])
        except Refused as refused:
            await self._gone(refused.message)
        self.cursor = max(self.cursor, up_to)

    async def _event(self, shown: str, thing: Object) -> None:
        line = _line(shown, thing)
        for fault in self.faults.take(STREAM, "watch", self.kind.plural, thing["metadata"]["name"]):
            if fault.effect == "miss":
                return
            if fault.effect == "duplicate":
                await self._send(line)
            elif fault.effect == "reorder":
                await self._flush()
                self._held = line
                return
            else:
                await self._break(fault, line)
        await self._send(line)
        await self._flush()

    async def _send(self, line: bytes) -> None:
        await self.exchange.chunk(line + b"\n")

    async def _flush(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await self._send(held)

    async def _bookmark(self) -> None:
        await self._flush()
        about = {"resourceVersion": str(self.cursor), "creationTimestamp": None}
        await self._send(
            _line("BOOKMARK", {"kind": "Bookmark", "apiVersion": self.kind.api_version, "metadata": about})
        )

    async def _break(self, fault: Fault, line: bytes) -> None:
        if fault.effect == "gone":
            await self._gone("too old resource version")
        if fault.effect == "cut":
            await self.exchange.chunk(line[: len(line) // 2])
        elif fault.effect == "freeze":
            if self._closed is not None:
                await asyncio.wait((self._closed,))
        else:
            await self.exchange.end()
        raise _Over

    async def _gone(self, message: str) -> None:
        await self._send(_line("ERROR", status_object(410, "Expired", message)))
        await self.exchange.end()
        raise _Over


def status_object(status: int, reason: str, message: str, **details: Any) -> Object:
    """As an API server says that something failed."""
    found: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status}
    return found | {"reason": reason, "message": message} | ({"details": details} if details else {})


def _line(shown: str, thing: Object) -> bytes:
    return json.dumps({"type": shown, "object": thing}).encode()
