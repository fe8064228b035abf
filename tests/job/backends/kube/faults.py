"""What goes wrong on purpose, and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

# What a request meets before its answer, what changes its answer, and what a running watch meets.
BEFORE = frozenset({"slow", "status", "hang"})
AFTER = frozenset({"lost", "cut_answer"})
STREAM = frozenset({"gone", "cut", "freeze", "end", "miss", "duplicate", "reorder"})


@dataclass
class Fault:
    """verb: get, list, watch, create, update, patch, delete, log, proxy. resource: a plural, or plural/subresource.
    Both, and name, may be shell patterns. times: how often, None for always. skip: how many matches pass before."""

    effect: str
    verb: str = "*"
    resource: str = "*"
    name: str = "*"
    times: int | None = 1
    skip: int = 0
    status: int = 500
    reason: str = "InternalError"
    retry_after: int | None = None
    seconds: float = 0.1
    back: int = 1
    fired: int = 0


@dataclass
class Faults:
    """Each method adds one fault and returns it, so that a test can see how often it `fired`. They add up: a slow
    answer can be a 500. Of several that would answer instead of the server, the first one does, the others wait."""

    wake: Callable[[], None] = lambda: None
    _all: list[Fault] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._all.append(fault)
        self.wake()
        return fault

    def clear(self) -> None:
        with self._lock:
            self._all.clear()

    def status(self, status: int, reason: str = "", retry_after: int | None = None, **where: object) -> Fault:
        """An error instead of an answer; nothing is done."""
        reasons = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}
        reasons |= {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
        named = reason or reasons.get(status, "Unknown")
        return self.add(Fault("status", status=status, reason=named, retry_after=retry_after, **where))  # type: ignore[arg-type]

    def slow(self, seconds: float, **where: object) -> Fault:
        return self.add(Fault("slow", seconds=seconds, **where))  # type: ignore[arg-type]

    def hang(self, **where: object) -> Fault:
        """The request is read, and no answer ever comes; nothing is done."""
        return self.add(Fault("hang", **where))  # type: ignore[arg-type]

    def lost(self, **where: object) -> Fault:
        """It is done, and the connection closes without an answer."""
        return self.add(Fault("lost", **where))  # type: ignore[arg-type]

    def cut_answer(self, **where: object) -> Fault:
        """It is done, and half of the answer comes."""
        return self.add(Fault("cut_answer", **where))  # type: ignore[arg-type]

    def stale(self, back: int = 1, **where: object) -> Fault:
        """A list as it was so many versions ago."""
        return self.add(Fault("stale", back=back, **({"verb": "list"} | where)))  # type: ignore[arg-type]

    def watch(self, effect: str, **where: object) -> Fault:
        """A running or coming watch: gone (410 in the stream), cut (in the middle of an event), freeze (open, and
        nothing more comes), end (as after timeoutSeconds), miss, duplicate or reorder (of the next events)."""
        assert effect in STREAM, effect
        return self.add(Fault(effect, verb="watch", **where))  # type: ignore[arg-type]

    def take(
        self, effects: Collection[str], verb: str, resource: str, name: str, only_due: bool = False
    ) -> list[Fault]:
        """What applies now, counted. only_due: leave those alone that still let something pass."""
        with self._lock:
            taken: list[Fault] = []
            for fault in self._all:
                if fault.effect not in effects or fault.times == 0 or not _meets(fault, verb, resource, name):
                    continue
                if fault.skip:
                    fault.skip -= 0 if only_due else 1
                    continue
                if fault.effect not in ("slow", "stale") and any(one.effect not in ("slow", "stale") for one in taken):
                    continue
                fault.times = None if fault.times is None else fault.times - 1
                fault.fired += 1
                taken.append(fault)
            return taken


def _meets(fault: Fault, verb: str, resource: str, name: str) -> bool:
    pairs = ((verb, fault.verb), (resource, fault.resource), (name, fault.name))
    return all(fnmatchcase(value, pattern) for value, pattern in pairs)
