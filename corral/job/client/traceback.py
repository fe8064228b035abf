"""Where in the user's source a Python traceback points, found in log lines as they pass."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from corral.job.client.cursor import Event

_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "([^"]{1,1024})", line (\d{1,7})')
_MAX_SOURCES = 512


@dataclass(frozen=True)
class Place:
    """file: relative to the root of the source. line: from 1. error: the traceback's last line."""

    file: str
    line: int
    error: str


@dataclass
class Tracebacks:
    """members: files of the source. Feed every log event; the first traceback of each source of output is kept."""

    members: Set[str]
    _open: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    _found: dict[tuple[str, int | None], Place] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        source, line = str(event.get("source", "")), str(event.get("line", ""))
        frames = self._open.get(source)
        if frames is None:
            if _START in line and len(self._open) < _MAX_SOURCES:
                self._open[source] = []
            return
        if frame := _FRAME.match(line):
            if member := self._member(frame[1]):
                frames.append((member, int(frame[2])))
        elif line and not line[0].isspace():
            del self._open[source]
            if frames and len(self._found) < _MAX_SOURCES:
                rank = event.get("rank")
                key = (source, rank if isinstance(rank, int) else None)
                self._found.setdefault(key, Place(*frames[-1], line))

    def place(self, rank: int | None) -> Place | None:
        """Of the failing rank if it left one, else of the driver, else of whoever was first."""
        for (_, other), place in self._found.items():
            if other == rank:
                return place
        return next(iter(self._found.values()), None)

    def places(self) -> list[Place]:
        """Of every source of output that left one, in the order in which their tracebacks ended."""
        return list(self._found.values())

    def _member(self, path: str) -> str | None:
        parts = PurePosixPath(path).parts
        for start in range(len(parts)):
            tail = "/".join(parts[start:])
            if tail in self.members:
                return tail
        return None
