"""Wall-clock of the phases: the timing_s metrics of a step, and the trace of the whole run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from corral.workers.worker import Phase


class Timers:
    """Times named phases on the driver; the phases of the ranks are added for the trace."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._name(0, 0, "driver", "driver")

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            duration = time.time() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + duration
            self._event(0, 0, name, start, duration)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def ranks(self, phases: Sequence[Sequence[Phase]], devices_per_node: int) -> None:
        """Add the phases of every rank: a process a node, a thread a rank."""
        for rank, done in enumerate(phases):
            node = rank // devices_per_node
            self._name(node + 1, rank + 1, f"node-{node}", f"rank-{rank}")
            for phase in done:
                self._event(node + 1, rank + 1, phase.name, phase.start, phase.duration)

    def events(self) -> list[dict[str, Any]]:
        """Trace Event Format; times in microseconds."""
        return self._events

    def _event(self, process: int, thread: int, name: str, start: float, duration: float) -> None:
        self._events.append(
            {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start * 1e6, "dur": duration * 1e6}
        )

    def _name(self, process: int, thread: int, process_name: str, thread_name: str) -> None:
        names = (("process_name", process_name), ("thread_name", thread_name))
        for kind, name in names:
            event = {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
            if event not in self._events:
                self._events.append(event)
