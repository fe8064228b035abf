"""One source on its way to the service: what is stored, what is read but not stored yet, what comes next."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from corral.job.agent.lines import LineReader, Redactor
from corral.job.agent.output import OutputFile
from corral.job.protocol.agent import LogChunk


class Outgoing:
    """Holds at most what one `fill` read, plus one unfinished line."""

    def __init__(self, file: OutputFile, stored: int, redactor: Redactor) -> None:
        self.file = file
        self._redactor = redactor
        self.restart(stored)

    def restart(self, stored: int) -> None:
        """Forget what was read; go on from byte `stored` of the file."""
        self._stored = self._read = stored
        self._reader = LineReader(stored, self._redactor)
        self._lines: list[str] = []
        self._offsets: list[int] = []

    def fill(self, limit: int) -> bool:
        """Read on, `limit` bytes at a time, until a line is waiting; False when the file ends before that."""
        while not self._lines:
            data = self.file.read(self._read, limit)
            if not data:
                return False
            self._read += len(data)
            self._lines, self._offsets = self._reader.feed(data)
        return True

    def flush(self) -> None:
        """Take the unfinished line at the end of the file as a line. Only when none is waiting."""
        self._lines, self._offsets = self._reader.flush()

    def chunk(self, lines: int, size: int) -> LogChunk | None:
        """The next of at most so many lines and bytes, at least one line; None when nothing is waiting.

        It stays waiting until `stored` says that it is stored.
        """
        if not self._lines:
            return None
        count = min(lines, max(1, bisect_right(self._offsets, self._stored + size) - 1))
        return LogChunk(
            source=self.file.source,
            node=self.file.node,
            rank=self.file.rank,
            start=self._stored,
            end=self._end_of(count),
            lines=self._lines[:count],
            offsets=self._offsets[:count],
        )

    def stored(self, end: int) -> None:
        """The service has the chunk that ends there."""
        count = bisect_left(self._offsets, end)
        self._stored = end
        del self._lines[:count], self._offsets[:count]

    def _end_of(self, count: int) -> int:
        """The byte after the first `count` waiting lines."""
        return self._offsets[count] if count < len(self._offsets) else self._reader.end
