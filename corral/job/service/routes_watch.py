"""What a job said: the live stream, plain text, and its events."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from corral.job.core.record import JobRecord
from corral.job.protocol.events import ALL_TYPES
from corral.job.protocol.views import EventList
from corral.job.service.auth import Reader, job_for
from corral.job.service.context import Service, service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.watch import MEDIA, Format, WatchResponse, encoded, not_found, ranks_of, wish_of

router = APIRouter(prefix="/api/v1/rayjobs/{job_id}", tags=["output"])

LAST = 2**53  # the largest whole number that every JSON reader keeps
Cursor = Annotated[int, Query(ge=0, le=LAST)]
Text = Annotated[str | None, Query(max_length=4096)]
_PLAIN = "text/plain; charset=utf-8"


@router.get(
    "/watch",
    response_class=Response,
    responses=answers(404, 503) | {200: {"content": {MEDIA["ndjson"]: {}, MEDIA["sse"]: {}}}},
)
async def watch(
    request: Request,
    caller: Reader,
    job_id: str,
    format: Format = "ndjson",
    after_seq: Cursor = 0,
    types: Text = None,
    ranks: Text = None,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> Response:
    """Events after `after_seq` (SSE: the Last-Event-ID), then those that come, until `final`; blank lines in between.

    Without `types` the first protocol is spoken: log, status, error and final, CANCELLED told as FAILED, and a job that
    nobody knows is a stream with `final` NOT_FOUND. With `types` (a list, or `all`) it is 404.
    """
    service = service_of(request)
    if format == "sse" and last_event_id:
        after_seq = _event_id(last_event_id)
    wish = wish_of(after_seq, types, ranks, format)
    try:
        job = await job_for(caller, job_id, request)
    except Refusal:
        if types is not None:
            raise
        return Response(not_found(job_id, service.clock.now(), format), media_type=MEDIA[format])
    _within(job, after_seq)
    if format == "sse" and job.terminal and after_seq == job.last_seq:
        return Response(status_code=204)  # tells an EventSource, which asks again after every end, to stop
    service.watchers.enter()
    pages = service.watchers.follow(service.journal, job.job_id, wish)
    return WatchResponse(service.watchers, encoded(pages, wish), format)


@router.get("/logs", response_class=Response, responses=answers(404) | {200: {"content": {_PLAIN: {}}}})
async def logs(
    request: Request,
    caller: Reader,
    job_id: str,
    rank: Annotated[int | None, Query(ge=0, le=99_999)] = None,
    attempt: Annotated[int | None, Query(ge=1, le=100)] = None,
    tail: Annotated[int | None, Query(ge=1, le=100_000)] = None,
) -> Response:
    """What is stored of the output, as plain text. Lines of ranks begin with their source unless one rank is chosen."""
    service = service_of(request)
    job = await job_for(caller, job_id, request)
    ranks = ranks_of(None if rank is None else str(rank))
    if tail is None:
        lines = _lines(service, job, 0, ranks, attempt)
        return StreamingResponse(lines, media_type=_PLAIN)
    return Response(await _tail(service, job, ranks, attempt, tail), media_type=_PLAIN)


@router.get("/events", response_model=EventList, responses=answers(404))
async def events(
    request: Request,
    caller: Reader,
    job_id: str,
    after_seq: Cursor = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> EventList:
    """Stored events that are no log lines."""
    service = service_of(request)
    job = await job_for(caller, job_id, request)
    _within(job, after_seq)
    store, found, done = service.journal.store, list[dict[str, object]](), False
    while not done and len(found) < limit:
        page = await service.journal.read(store.read, job.job_id, after_seq, types=ALL_TYPES - {"log"}, ranks=None)
        if page.next_seq == after_seq and not page.data:
            break
        found += map(json.loads, page.data.splitlines())
        after_seq, done = page.next_seq, page.done
    if len(found) > limit:
        found, done = found[:limit], False
        after_seq = int(str(found[-1]["seq"]))
    return EventList(events=found, next_seq=after_seq, done=done)


async def _lines(
    service: Service, job: JobRecord, after_seq: int, ranks: frozenset[int] | None, attempt: int | None
) -> AsyncIterator[bytes]:
    """Stored lines up to the newest event of now."""
    store, last = service.journal.store, job.last_seq
    while after_seq < last:
        page = await service.journal.read(store.read, job.job_id, after_seq, types=frozenset({"log"}), ranks=ranks)
        text = []
        for encoded_event in page.data.splitlines():
            event = json.loads(encoded_event)
            if event["type"] == "log" and attempt in {None, event["attempt"]}:
                place = "" if ranks is not None or event["rank"] is None else f"[{event['source']}] "
                text.append(f"{place}{event['line']}\n")
        if text:
            yield "".join(text).encode("utf-8", "replace")
        if page.done or page.next_seq == after_seq:
            return
        after_seq = page.next_seq


async def _tail(
    service: Service, job: JobRecord, ranks: frozenset[int] | None, attempt: int | None, count: int
) -> bytes:
    """The last `count` lines: read from a point that is probably early enough, and from ever earlier ones if not."""
    span = 2 * count
    while True:
        start = max(0, job.last_seq - span)
        kept: deque[bytes] = deque(maxlen=count)
        async for piece in _lines(service, job, start, ranks, attempt):
            kept.extend(piece.splitlines(keepends=True))
        if len(kept) == count or start == 0:
            return b"".join(kept)
        span *= 8


def _event_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= LAST):
        raise Refusal(422, f"Last-Event-ID {text[:40]!r} is no id of ours")
    return int(text)


def _within(job: JobRecord, after_seq: int) -> None:
    if after_seq > job.last_seq:
        raise Refusal(422, f"after_seq={after_seq} is beyond the newest event of {job.job_id}, {job.last_seq}")
