"""A copy of one kind of objects that follows the server: list, watch from there, list again when the thread is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from corral.job.backends.kuberay.client import Change, Kind, KubeClient, Listing, Object
from corral.job.backends.kuberay.errors import Gone, KubeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """Seconds. floor: least time between two watches. pause, cap: first and longest wait after a failure. resync: how
    often everything is listed although nothing seems wrong, which heals an event that was never sent. watch: asked of
    the server for one watch. silence: without a byte, after which a connection counts as lost."""

    floor: float = 0.2
    pause: float = 0.5
    cap: float = 30.0
    resync: float = 600.0
    watch: float = 240.0
    silence: float = 90.0

    def pauses(self) -> Iterator[float]:
        pause = self.pause
        while True:
            yield random.uniform(0.5, 1.0) * pause
            pause = min(self.cap, 2 * pause)


class Informer:
    """What the server has of a kind, in one namespace, under one label selector.

    The view never goes back: an object is replaced only by a newer resource version of it, an older list is not taken,
    and what was deleted does not return by an event from before. synced: the first list is in. changed: set whenever
    the view changes; whoever waits for it clears it. trouble: one line, why the server is not heard, "" when it is.
    Objects that are handed out are shared: do not change them.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        *,
        selector: str = "",
        namespace: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.synced = asyncio.Event()
        self.changed = asyncio.Event()
        self.trouble = ""
        self._client = client
        self._kind = kind
        self._selector = selector
        self._namespace = namespace
        self._pace = pace or Pace()
        self._objects: dict[str, Object] = {}
        self._seen: dict[str, int] = {}  # name → newest version met, also of what is deleted
        self._listed = -1  # version of the last list: nothing up to it is news
        self._version = -1  # newest version met at all: where a watch goes on
        self._list_at = 0.0  # monotonic; when to list again
        self._heard = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow, in the loop that runs. A second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"informer {self._kind.plural}")

    async def close(self) -> None:
        """Stop following. What is known stays readable."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def get(self, name: str) -> Object | None:
        self._check()
        return self._objects.get(name)

    def items(self) -> list[Object]:
        """By name."""
        self._check()
        return [self._objects[name] for name in sorted(self._objects)]

    def age(self) -> float:
        """Seconds since the server was last heard; infinite before the first list. Up to a minute when all is well
        and nothing happens."""
        return time.monotonic() - self._heard

    def _check(self) -> None:
        """A bug in here must not look like a quiet server."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        pauses = self._pace.pauses()
        while True:
            began, before = time.monotonic(), self._version
            try:
                await self._round()
            except KubeError as error:
                self._lost(error)
                wait = next(pauses)
                if error.retry_after is not None:
                    wait = max(wait, min(error.retry_after, self._pace.cap))
            else:
                lived = time.monotonic() - began
                if lived >= self._pace.floor or self._version > before:
                    pauses = self._pace.pauses()
                    wait = max(0.0, self._pace.floor - lived)
                else:
                    wait = next(pauses)  # a watch that ends at once, over and over
            await asyncio.sleep(wait)

    def _lost(self, error: KubeError) -> None:
        if isinstance(error, Gone):
            self._list_at = 0.0
        if self.trouble != error.message:
            _log.log(logging.INFO if isinstance(error, Gone) else logging.WARNING, "%s", error.message)
        self.trouble = error.message

    async def _round(self) -> None:
        """A list when one is due, then one watch until it ends or the next list is due."""
        if time.monotonic() >= self._list_at:
            self._take(await self._client.list(self._kind, selector=self._selector, namespace=self._namespace))
        left = self._list_at - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._follow(min(self._pace.watch, left + 1))

    async def _follow(self, seconds: float) -> None:
        watch = self._client.watch(
            self._kind,
            str(self._version),
            selector=self._selector,
            namespace=self._namespace,
            seconds=seconds,
            silence=self._pace.silence,
        )
        async with contextlib.aclosing(watch):
            async for change in watch:
                self._note()
                self._apply(change)
        self._note()

    def _take(self, listing: Listing) -> None:
        """Make the view what a list says, unless it is older than what we know."""
        version = _number(listing.resource_version)
        if version < self._version:
            message = f"{self._kind.plural}: the list is of version {version}, {self._version} was seen"
            if self._list_at == 0.0:
                raise KubeError(0, "Stale", message)
            # The watch may go on from where it is; a list that heals what was missed has to be a newer one.
            self._list_at = time.monotonic() + min(self._pace.cap, self._pace.resync)
            _log.info("%s", message)
            return
        objects = {thing["metadata"]["name"]: thing for thing in listing.items}
        changed = {name: _version(thing) for name, thing in objects.items()} != {
            name: _version(thing) for name, thing in self._objects.items()
        }
        self._objects = objects
        self._seen = {name: _version(thing) for name, thing in objects.items()}
        self._listed = self._version = version
        self._list_at = time.monotonic() + self._pace.resync
        self._note()
        if changed:
            self.changed.set()
        self.synced.set()

    def _apply(self, change: Change) -> None:
        version = _version(change.object)
        self._version = max(self._version, version)
        if change.type == "BOOKMARK":
            return
        name = change.object["metadata"]["name"]
        if version <= max(self._listed, self._seen.get(name, -1)):
            return  # sent twice, or late
        self._seen[name] = version
        if change.type == "DELETED":
            if self._objects.pop(name, None) is None:
                return
        else:
            self._objects[name] = change.object
        self.changed.set()

    def _note(self) -> None:
        self._heard = time.monotonic()
        self.trouble = ""


def _version(thing: Object) -> int:
    return _number(str((thing.get("metadata") or {}).get("resourceVersion")))


def _number(version: str) -> int:
    """Resource versions are numbers that grow, which Kubernetes promises since 1.35 and has always kept."""
    if not version.isdecimal():
        raise KubeError(0, "NotKubernetes", f"a resource version is {version[:40]!r}, not a number")
    return int(version)
