"""One log of Ray, which can only be read from its start, taken in once.

A replay is compared with what was taken by a hash of that prefix: the same, and reading goes on behind it; another
file, and all of it is taken in again, which is why whatever takes it has to be idempotent. How a reading ends (close
codes 1000, 1006, 1009, a cut chunk, a line longer than the socket lets through) means nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from corral.errors import InfraError
from corral.job.backends.ray_jobs.api import JobsApi

LONGEST_LINE = 1 << 20  # characters of a line that is looked at; that is the end record of 30 000 ranks
SLICE = 1 << 20  # characters that are taken without letting others run


class Lines:
    """Cuts text that comes in pieces into lines without their ends. Lines that are too long come as ""."""

    def __init__(self) -> None:
        self._rest: list[str] = []
        self._length = 0

    def feed(self, text: str) -> list[str]:
        *ended, rest = text.split("\n")
        lines = []
        for piece in ended:
            self._add(piece)
            lines.append("".join(self._rest) if self._length <= LONGEST_LINE else "")
            self._rest, self._length = [], 0
        self._add(rest)
        return lines

    def rest(self) -> str:
        """The last line, when nothing more comes."""
        return "".join(self._rest) if self._length <= LONGEST_LINE else ""

    def _add(self, piece: str) -> None:
        self._length += len(piece)
        if self._length <= LONGEST_LINE:
            self._rest.append(piece)
        else:
            self._rest = []


class Tail:
    """take: gets each line of the log once, in order, and all of them again, after `restart` was called, when the log
    turns out to be another, or a line could not be taken. taken: characters that were taken."""

    def __init__(
        self, api: JobsApi, submission_id: str, take: Callable[[str], None], restart: Callable[[], None]
    ) -> None:
        self._api, self._submission_id, self._take, self._restart = api, submission_id, take, restart
        self._begin()

    def start_over(self) -> None:
        """Take everything again."""
        self._begin()
        self._restart()

    async def once(self, moved: Callable[[], bool] = lambda: False) -> int:
        """Read from the socket until it ends; how many characters came. moved: called after each piece that held
        something new; True ends it."""
        replay = _Replay(self)
        async for piece in self._api.tail(self._submission_id):
            new = replay.feed(piece)
            if new is None:
                self.start_over()
                return 0
            if new:
                self._took(new)
                if moved():
                    break
        return replay.length

    async def whole(self) -> int:
        """Read all there is in one answer; how many characters that are. Raises InfraError when it cannot be had."""
        text = await self._api.logs(self._submission_id)
        new = _Replay(self).feed(text) if len(text) >= self.taken else None
        if new is None:
            self.start_over()
            new = text
        for at in range(0, len(new), SLICE):
            self._took(new[at : at + SLICE])
            await asyncio.sleep(0)
        return len(text)

    def last_line(self) -> str:
        """What came after the last line end."""
        return self._lines.rest()

    def is_prefix(self, digest: bytes) -> bool:
        return self._hash.digest() == digest

    def _begin(self) -> None:
        self.taken = 0
        self._hash = hashlib.blake2b()
        self._lines = Lines()

    def _took(self, text: str) -> None:
        self.taken += len(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        try:
            for line in self._lines.feed(text):
                self._take(line)
        except (InfraError, OSError):  # of this piece, nobody knows which lines were taken
            self.start_over()
            raise


class _Replay:
    """One reading from the start."""

    def __init__(self, tail: Tail) -> None:
        self._tail, self._known, self._hash = tail, tail.taken, hashlib.blake2b()
        self.length = 0

    def feed(self, piece: str) -> str | None:
        """The part that was not taken yet; None: what was taken is not the start of this log."""
        known = piece[: max(0, self._known - self.length)]
        before = self.length < self._known
        self.length += len(piece)
        if known:
            self._hash.update(known.encode("utf-8", "surrogatepass"))
        if before and self.length >= self._known and not self._tail.is_prefix(self._hash.digest()):
            return None
        return piece[len(known) :]
