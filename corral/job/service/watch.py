"""Following a job: what is stored, then what comes, until `final` has been sent.

The body ends whole only after `final`. Whatever else ends it (shutdown, an error) cuts the connection, so that a client
that knows nothing of cursors takes it for a failed transfer and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from corral.job.protocol.events import (
    ALL_TYPES,
    FIRST_TYPES,
    KEEP_ALIVE,
    KEEP_ALIVE_SECONDS,
    as_sse,
    encode,
    for_first_clients,
)
from corral.job.service.errors import Refusal
from corral.job.service.gate import StreamCut
from corral.job.service.journal import Journal
from corral.job.store.store import Page

Format = Literal["ndjson", "sse"]
MEDIA = {"ndjson": "application/x-ndjson", "sse": "text/event-stream"}
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_SSE_KEEP_ALIVE = b":\n\n"


@dataclass(frozen=True)
class Wish:
    """What a client wants to see. first: it named no types, so it speaks the first protocol."""

    after_seq: int
    types: frozenset[str]
    ranks: frozenset[int] | None
    form: Format
    first: bool


class Watchers:
    """All open watches of the service. `stop` cuts them; a new one is refused at the limit and after `stop`."""

    def __init__(self, limit: int, keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        self.limit = limit
        self.keep_alive = keep_alive
        self.count = 0
        self.stopping = False
        self._news: set[asyncio.Event] = set()

    def enter(self) -> None:
        """Take a place, to be given back with `leave`. Raises Refusal 503."""
        if self.stopping:
            raise Refusal(503, "the service is shutting down", {"Retry-After": "2"})
        if self.count >= self.limit:
            line = f"{self.count} watches are open, the limit of this service; try again, or read /events and /logs"
            raise Refusal(503, line, {"Retry-After": "5"})
        self.count += 1

    def leave(self) -> None:
        self.count -= 1

    def stop(self) -> None:
        """Cut all watches, for the end of the service."""
        self.stopping = True
        for news in self._news:
            news.set()

    async def follow(self, journal: Journal, job_id: str, wish: Wish) -> AsyncIterator[Page]:
        """Pages of events up to and with `final`; an empty page when nothing came for `keep_alive` seconds.

        Raises StreamCut once `stop` was called.
        """
        cursor = wish.after_seq
        with journal.following(job_id) as news:
            self._news.add(news)
            try:
                while True:
                    news.clear()
                    if self.stopping:
                        raise StreamCut
                    page = await journal.page(job_id, cursor, wish.types, wish.ranks)
                    moved, cursor = page.next_seq != cursor, page.next_seq
                    if page.data or page.done:
                        yield page
                    if page.done:
                        return
                    if not page.data and not moved:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(news.wait(), self.keep_alive)
                        if not news.is_set():
                            yield page
            finally:
                self._news.discard(news)


class WatchResponse(StreamingResponse):
    """Holds one place among the watchers until it is over, also when the client never reads a byte."""

    def __init__(self, watchers: Watchers, pieces: AsyncIterator[bytes], form: Format) -> None:
        super().__init__(pieces, headers=_HEADERS, media_type=MEDIA[form])
        self.watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.watchers.leave()


async def encoded(pages: AsyncIterator[Page], wish: Wish) -> AsyncIterator[bytes]:
    """Pages in the form a client asked for; stored bytes go out as they are wherever that form allows it."""
    async for page in pages:
        if not page.data:
            if not page.done:
                yield KEEP_ALIVE if wish.form == "ndjson" else _SSE_KEEP_ALIVE
            continue
        data = page.data
        if wish.first and page.done:
            head, last = _last_line(data)
            data = head + for_first_clients(last)
        yield data if wish.form == "ndjson" else b"".join(map(as_sse, data.splitlines(keepends=True)))


def not_found(job_id: str, now: float, form: Format) -> bytes:
    """The whole stream of a job nobody knows, for clients that know no other way to hear of it."""
    message = f"no job {job_id[:64]!r}"
    error = encode(1, now, 0, "error", {"message": message})
    final = encode(2, now, 0, "final", {"status": "NOT_FOUND", "cause": "not_found", "message": message})
    return error + final if form == "ndjson" else as_sse(error) + as_sse(final)


def wish_of(after_seq: int, types: str | None, ranks: str | None, form: Format) -> Wish:
    """Parse the query of a watch. Raises Refusal 422 for what is no type or rank."""
    return Wish(after_seq, types_of(types), ranks_of(ranks), form, first=types is None)


def types_of(text: str | None) -> frozenset[str]:
    if text is None:
        return FIRST_TYPES
    if text == "all":
        return ALL_TYPES
    types = frozenset(part.strip() for part in text.split(",") if part.strip())
    if unknown := sorted(types - ALL_TYPES):
        raise Refusal(422, f"types: {unknown[0][:40]!r} is none of {', '.join(sorted(ALL_TYPES))}, all")
    return types | {"final"}


def ranks_of(text: str | None) -> frozenset[int] | None:
    if text is None or not text.strip():
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) <= 5):
            raise Refusal(422, f"ranks: {part[:40]!r} is no rank; give numbers such as 0,3")
    return frozenset(map(int, parts))


def _last_line(data: bytes) -> tuple[bytes, bytes]:
    cut = data.rfind(b"\n", 0, len(data) - 1) + 1
    return data[:cut], data[cut:]
