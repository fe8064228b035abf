"""Raw log files of an attempt, put together on the service's disk from pieces that come from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from corral.job.backends import folder as files
from corral.job.protocol.agent import DRIVER
from corral.job.protocol.frames import Bytes

MOST_WAITING = 16 << 20  # bytes of pieces that are kept until what comes before them is there


class RawFiles:
    """Files of an attempt's folder, as folder.sources names them. Below the watermark of a source they may have holes,
    as that is stored already; beyond it none: whoever reads a hole would take it for output.

    dropped: pieces had to be let go of; they have to be given once more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watermarks: dict[str, int] = {}
        self._waiting: dict[str, dict[int, bytes]] = {}
        self._size = 0
        self.dropped = False

    def stored(self, watermarks: Mapping[str, int]) -> None:
        """What the service has stored by now, which may close gaps. Raises OSError."""
        for source, mark in watermarks.items():
            self._watermarks[source] = max(mark, self._watermarks.get(source, 0))
        for source in list(self._waiting):
            self._catch_up(source)

    def put(self, piece: Bytes) -> None:
        """Write what is new of it, now or when what comes before it is there. Raises OSError."""
        if piece.start <= self._end(piece.source):
            self._write(piece.source, piece.start, piece.content)
            self._catch_up(piece.source)
            return
        waiting = self._waiting.setdefault(piece.source, {})
        self._size += len(piece.content) - len(waiting.get(piece.start, b""))
        waiting[piece.start] = piece.content
        if self._size > MOST_WAITING:
            self._waiting, self._size, self.dropped = {}, 0, True

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """Whether everything up to these sizes is stored or in a file."""
        return all(self._end(source) >= size for source, size in sizes.items())

    def _catch_up(self, source: str) -> None:
        waiting = self._waiting.get(source, {})
        for start in sorted(waiting):
            if start > self._end(source):
                return
            self._write(source, start, waiting[start])
            self._size -= len(waiting.pop(start))
        self._waiting.pop(source, None)

    def _end(self, source: str) -> int:
        """Up to where everything is stored or in the file."""
        try:
            size = self._path(source).lstat().st_size
        except FileNotFoundError:
            size = 0
        return max(size, self._watermarks.get(source, 0))

    def _write(self, source: str, start: int, content: bytes) -> None:
        end = self._end(source)
        new = content[max(0, end - start) :]
        if not new:
            return
        path = self._path(source)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            at = max(start, end)
            while new:
                written = os.pwrite(file, new, at)
                at, new = at + written, new[written:]
        finally:
            os.close(file)

    def _path(self, source: str) -> Path:
        if source == DRIVER:
            return self._folder / files.DRIVER_LOG
        node, rank = source.split("/")
        return self._folder / files.RUN / "logs" / node / f"{rank}.log"
