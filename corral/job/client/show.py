"""Events on a terminal or in a file: what the job printed on stdout, what happened to it on stderr."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from corral.job.client.cursor import Event
from corral.job.client.text import one_line, printable
from corral.job.protocol.verdict import Verdict

OUT, ERR = 1, 2

Piece = tuple[int, str]  # file descriptor, whole lines


class Screen(Protocol):
    """Where a job is shown. `events` returns when they are written, so that a slow reader slows the stream. note: about
    the job or the connection. print: what a script reads from stdout. ended: the verdict, or None and why not.
    """

    async def events(self, events: list[Event]) -> None: ...
    def note(self, line: str) -> None: ...
    async def print(self, line: str) -> None: ...
    def submitted(self, job_id: str, url: str) -> None: ...
    async def ended(self, verdict: Verdict | None, line: str) -> None: ...
    async def close(self) -> None: ...


class Writer:
    """Writes in a thread of its own, in order: a reader that stops must not stop signals, heartbeats and the stream's
    keep-alives. What a stdout that is closed (`| head`) or full refuses is dropped, and `closed` is called once, from
    that thread: a job goes on, and has a verdict, whatever becomes of its reader. copy: a descriptor that gets all of
    it too."""

    def __init__(self, copy: int | None = None) -> None:
        self._copy = copy
        self.closed: Callable[[], object] = lambda: None
        self.failed: str | None = None  # why stdout took no more, unless its reader left
        self._thread = ThreadPoolExecutor(1, "corral-show")
        self._gone: set[int] = set()

    async def write(self, pieces: Iterable[Piece]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, list(pieces))

    def write_soon(self, pieces: Iterable[Piece]) -> None:
        self._thread.submit(self._write, list(pieces))

    def flush(self) -> None:
        """Wait until all of it is written; for those who do not run in a loop."""
        self._thread.submit(lambda: None).result()

    def _write(self, pieces: list[Piece]) -> None:
        for fd, text in pieces:
            data = text.encode("utf-8", "replace")
            for place in (fd, self._copy):
                if place is not None and place not in self._gone:
                    self._write_to(place, data)

    def _write_to(self, fd: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError as error:
            self._gone.add(fd)
            if fd == OUT:
                if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
                    self.failed = f"cannot write to stdout: {error.strerror}"
                    self._write([(ERR, f"-- {self.failed}; the rest is not shown\n")])
                self.closed()


class PlainScreen:
    """`[node-1 rank-5] text` for what a rank printed, the driver's lines as they are, states as `-- RUNNING ...`."""

    def __init__(self, writer: Writer, colour: bool) -> None:
        self._writer = writer
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if colour else ("", "")

    async def events(self, events: list[Event]) -> None:
        await self._writer.write(merged(self._piece(event) for event in events))

    def note(self, line: str) -> None:
        self._writer.write_soon([self._aside(line)])

    async def print(self, line: str) -> None:
        await self._writer.write([(OUT, f"{line}\n")])

    def submitted(self, job_id: str, url: str) -> None:
        self.note(f"job {job_id} at {url}")

    async def ended(self, verdict: Verdict | None, line: str) -> None:
        await self._writer.write([(ERR, f"{line}\n")])

    async def close(self) -> None:
        await self._writer.write([])

    def _piece(self, event: Event) -> Piece:
        if event["type"] == "log":
            return OUT, log_line(event) + "\n"
        text = happening(event)
        return self._aside(text) if text else (ERR, "")

    def _aside(self, line: str) -> Piece:
        return ERR, f"{self._dim}-- {line}{self._plain}\n"


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours for the same descriptor together, so that a chunk of a stream costs a few system calls."""
    groups: list[tuple[int, list[str]]] = []
    for fd, text in pieces:
        if text and groups and groups[-1][0] == fd:
            groups[-1][1].append(text)
        elif text:
            groups.append((fd, [text]))
    return [(fd, "".join(texts)) for fd, texts in groups]


def log_line(event: Event) -> str:
    """A `log` event as one line, safe for a terminal."""
    line = printable(str(event.get("line", "")))
    rank = event.get("rank")
    return line if rank is None else f"[node-{_number(event.get('node'))} rank-{_number(rank)}] {line}"


def happening(event: Event) -> str | None:
    """What an event other than `log` says, in one line; None for `final`, which is told as a verdict, and for types
    that came after this client."""
    kind = event["type"]
    message = one_line(str(event.get("message") or ""))
    if kind == "status":
        state = one_line(str(event.get("status", "")))
        return message if state and message.startswith(state) else f"{state} {message}".strip()
    if kind == "phase":
        return one_line(f"{event.get('phase', '')} {message}") or None
    if kind in ("preflight", "warning", "error"):
        return f"{kind}: {message}"
    return None


def _number(value: Any) -> str:
    return str(value) if type(value) is int else "?"
