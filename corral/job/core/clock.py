"""The service's time: Unix seconds that never go back and do not follow changes of the system's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Wall time at its making plus the monotonic time since. One per service process.

    A restart takes the wall time anew, so times that are stored may lie in the future of a later clock; whoever
    subtracts them takes a negative span for 0.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        self._latest = 0.0

    def now(self) -> float:
        self._latest = max(self._latest, self._offset + self._monotonic())
        return self._latest


def elapsed(since: float | None, now: float) -> float:
    """Seconds from `since` to `now`, 0 when it is unknown or in the future."""
    return 0.0 if since is None else max(0.0, now - since)
