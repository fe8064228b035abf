"""Follow a job to its verdict. The end of a connection is never the end of a job: only a `final` event is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from corral.errors import CorralError, InfraError
from corral.job.client.api import Api, BusyError, reason
from corral.job.client.cursor import Cursor, Event
from corral.job.client.text import one_line
from corral.job.client.verdicts import verdict_of
from corral.job.protocol.states import TERMINAL
from corral.job.protocol.verdict import Verdict

_STUCK = 3  # connections that may break at the same jump in the sequence numbers


@dataclass(frozen=True)
class Wanted:
    """What of a job is to be seen. types: empty means all; status and final always come. ranks: None means all."""

    types: frozenset[str] = frozenset()
    ranks: tuple[int, ...] | None = None

    @property
    def gapless(self) -> bool:
        return not self.types and self.ranks is None

    def params(self) -> dict[str, str]:
        types = ",".join(sorted(self.types | {"status", "final"})) if self.types else "all"
        params = {"format": "ndjson", "types": types}
        if self.ranks is not None:
            params["ranks"] = ",".join(map(str, self.ranks))
        return params


class Follower:
    """One job, followed over any number of connections.

    show: awaited with the events of each piece of the stream, in order, each exactly once; while it waits nothing more
    is read, so a slow reader costs no memory. note: told in one line about trouble with the connection.
    """

    def __init__(
        self,
        api: Api,
        job_id: str,
        cursor: Cursor,
        wanted: Wanted,
        show: Callable[[list[Event]], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        self._api = api
        self._job_id = job_id
        self._path = f"/api/v1/rayjobs/{quote(job_id, safe='')}/watch"
        self.cursor = cursor
        self._wanted = wanted
        self._show = show
        self._note = note
        self._heard = time.monotonic()  # when a connection last gave something

    async def verdict(self) -> Verdict:
        """Watch until the final event. Reconnects, from where it was, for as long as `patience.reconnect` without
        anything new. Raises AbsentError, UnauthorisedError, or InfraError when the verdict is not obtainable."""
        self._heard = time.monotonic()
        pauses = self._api.patience.pauses()
        quiet = False  # whether this loss has been told
        jumps = 0  # connections that broke at the same jump
        while True:
            before = self.cursor.seq, self._heard
            problem, after = await self._connection()
            if self.cursor.final is not None:
                return verdict_of(self.cursor.final)
            if (self.cursor.seq, self._heard) != before:
                pauses, quiet = self._api.patience.pauses(), False
                jumps = 0
            elif self.cursor.jump is not None:
                jumps += 1
                if jumps >= _STUCK:
                    self._note(f"the service has no events between {self.cursor.seq} and {self.cursor.jump}")
                    self.cursor.accept_jump()
                    continue
            if not quiet:
                self._note(f"connection lost ({problem}); going on after event {self.cursor.seq}")
                quiet = True
            pause = max(next(pauses), min(after, 30.0))
            if time.monotonic() - self._heard + pause > self._api.patience.reconnect:
                return await self._last_resort(problem)
            await asyncio.sleep(pause)

    async def _connection(self) -> tuple[str, float]:
        """One connection until it ends: (what ended it, seconds the service asks us to stay away)."""
        self.cursor.connected()
        params = self._wanted.params() | {"after_seq": str(self.cursor.seq)}
        try:
            async with self._api.stream(self._path, params) as answer:
                kind = answer.headers.get("Content-Type", "").partition(";")[0]
                if kind.lower() != "application/x-ndjson":
                    return f"the answer is {one_line(kind) or 'of no type'}, no event stream", 0.0
                async for data in answer.aiter_bytes():
                    events = self.cursor.feed(data)
                    if events or not data.strip():
                        self._heard = time.monotonic()
                    if events:
                        await self._show(events)
                    if self.cursor.final is not None:
                        return "final", 0.0
                    if self.cursor.broken is not None:
                        return self.cursor.broken, 0.0
        except httpx.RequestError as error:
            return reason(error), 0.0
        except BusyError as error:
            return str(error), error.after
        return "the stream ended before the verdict", 0.0

    async def _last_resort(self, problem: str) -> Verdict:
        """The stream is beyond reach; a final event that is asked for by itself is one all the same."""
        try:
            job = await self._api.job(self._job_id)
            seq, done = self.cursor.seq, job.state not in TERMINAL
            while not done:
                page = await self._api.events(self._job_id, seq)
                for event in page.events:
                    if event.get("type") == "final":
                        self._note(f"log lines after event {self.cursor.seq} are not shown: corral logs {self._job_id}")
                        return verdict_of(event)
                seq, done = page.next_seq, page.done or page.next_seq <= seq
        except CorralError as error:
            problem = f"{problem}; {error}"
        raise InfraError(
            f"verdict not obtainable: {problem}; job {self._job_id} may still run; "
            f"corral watch {self._job_id} --after-seq {self.cursor.seq} goes on"
        )
