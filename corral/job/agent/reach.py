"""Whether the service answers, as all who talk to it see it together."""

from __future__ import annotations

import time


class Reach:
    """Each caller says how its calls go; a service that refuses counts as one that does not answer."""

    def __init__(self) -> None:
        self._failing: dict[str, float] = {}  # caller → since when all its calls fail
        self.ever = False  # it has answered once

    def answered(self, caller: str) -> None:
        self.ever = True
        self._failing.pop(caller, None)

    def failed(self, caller: str) -> None:
        self._failing.setdefault(caller, time.monotonic())

    def silent(self, caller: str) -> float:
        """Seconds for which all calls of this one have failed; -1 when the last one did not."""
        since = self._failing.get(caller)
        return -1.0 if since is None else time.monotonic() - since

    @property
    def longest(self) -> float:
        """The most of it, over all callers."""
        return max((self.silent(caller) for caller in list(self._failing)), default=-1.0)
