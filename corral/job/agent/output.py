"""The files a job's output is in, as sources named by the protocol. A job may have put anything in their place."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.job.protocol.agent import DRIVER

_NODE = re.compile(r"node-(0|[1-9]\d{0,3})")
_RANK = re.compile(r"rank-(0|[1-9]\d{0,4})\.log")


@dataclass(frozen=True)
class OutputFile:
    """source: as in LogChunk. node, rank: None for the driver."""

    source: str
    path: Path
    node: int | None = None
    rank: int | None = None

    def size(self) -> int:
        """Bytes now; 0 for what is not a file."""
        try:
            found = self.path.lstat()
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def read(self, at: int, limit: int) -> bytes:
        """See read_regular."""
        return read_regular(self.path, at, limit)


def read_regular(path: Path, at: int, limit: int) -> bytes:
    """At most `limit` bytes from byte `at` on; b"" at the end, and for what is not a file (a link, a pipe)."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(file, limit, at) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def output_files(driver_log: Path, run: Path) -> list[OutputFile]:
    """The driver's file and those of all ranks that have one by now, in the order of nodes and ranks."""
    ranks = [
        (node, rank, path) for node, folder in _entries(run / "logs", _NODE) for rank, path in _entries(folder, _RANK)
    ]
    return [
        OutputFile(DRIVER, driver_log),
        *(OutputFile(f"node-{node}/rank-{rank}", path, node, rank) for node, rank, path in sorted(ranks)),
    ]


def _entries(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if (match := name.fullmatch(entry.name)) and not entry.is_symlink():
                    yield int(match[1]), Path(entry.path)
    except OSError:
        return
