"""A Kubernetes API server for tests: real HTTP on loopback, objects that behave, and everything that can go wrong.

with FakeKube() as kube:
    kube.kubeconfig(path)
    kube.faults.status(409, verb="create", resource="rayjobs")
"""

from __future__ import annotations

import asyncio
import copy
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.job.backends.kube.discovery import named
from tests.job.backends.kube.faults import Faults
from tests.job.backends.kube.http import Request, Server
from tests.job.backends.kube.podlogs import PodLog
from tests.job.backends.kube.routes import Call, Routes
from tests.job.backends.kube.schema import check_rayjob
from tests.job.backends.kube.store import Moment, Object, Refused, Store

Hook = Callable[[str, Object], None]


@dataclass(frozen=True)
class Seen:
    """One request. resource: plural/subresource, "" for paths that are no objects. at: monotonic seconds."""

    at: float
    verb: str
    resource: str
    namespace: str
    name: str
    authorization: str
    target: str


class FakeKube:
    """tokens: those that are let in; empty: everybody. requests: all that came, also those that were answered badly.
    bookmark_seconds: between two bookmarks of a watch. store: the objects, for what the methods here do not offer.

    Objects are handed out as copies. Kinds are named by their plural.
    """

    def __init__(
        self,
        namespaces: Sequence[str] = ("default", "corral"),
        *,
        tokens: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        bookmark_seconds: float = 30.0,
    ) -> None:
        self.store = Store(namespaces)
        self.store.checks.append(check_rayjob)
        self.store.listeners.append(self._changed)
        self.faults = Faults(wake=self._wake)
        self.tokens = set(tokens)
        self.bookmark_seconds = bookmark_seconds
        self.requests: list[Seen] = []
        self.routes: dict[tuple[str, str, str], tuple[str, int]] = {}
        self._logs: dict[tuple[str, str, str], PodLog] = {}
        self._pages: dict[str, tuple[list[Object], int, int]] = {}
        self._watchers: set[asyncio.Event] = set()
        self._hooks: list[Hook] = []
        self._calls: deque[Future[None]] = deque()
        self._moved = threading.Condition(self.store.lock)
        self._tls = tls is not None
        self._server = Server(Routes(self), tls)
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="fake kube hooks")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections. Raises what a hook raised, and what went wrong in here."""
        trouble: list[BaseException | None] = []
        while self._calls:  # a hook may change something, which calls hooks again
            trouble.append(self._calls.popleft().exception())
        self._hooks.clear()
        self._caller.shutdown()
        self._server.close()
        for error in [*trouble, *self._server.crashes]:
            if error is not None:
                raise error

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.port}"

    @property
    def connections(self) -> int:
        """Open now."""
        return self._server.open

    @property
    def connected(self) -> int:
        """Ever opened."""
        return self._server.connected

    @property
    def watches(self) -> int:
        """Running now."""
        return len(self._watchers)

    def kubeconfig(
        self,
        path: Path,
        *,
        namespace: str = "corral",
        user: Mapping[str, Any] | None = None,
        cluster: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one with a single context, "fake". user: its fields; left out, the first token is in it."""
        known = {"token": min(self.tokens)} if self.tokens else {}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url, **(cluster or {})}}],
            "users": [{"name": "me", "user": dict(known if user is None else user)}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def objects(self, plural: str, namespace: str | None = None) -> list[Object]:
        """All of a kind, by namespace and name."""
        return self.store.list(named(plural), namespace, lambda thing: True)[0]

    def find(self, plural: str, name: str, namespace: str = "corral") -> Object | None:
        try:
            return self.store.get(named(plural), namespace, name)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def create(self, plural: str, body: Object, namespace: str = "corral") -> Object:
        return self.store.create(named(plural), namespace, body)

    def patch(self, plural: str, name: str, patch: Any, namespace: str = "corral") -> Object:
        """A mapping is merged; a list is a JSON patch."""
        return self.store.patch(named(plural), namespace, name, patch)

    def set_status(self, plural: str, name: str, status: Object, namespace: str = "corral") -> Object:
        """Merge into the status."""
        return self.store.patch(named(plural), namespace, name, {"status": status}, "status")

    def delete(self, plural: str, name: str, namespace: str = "corral", propagation: str = "Background") -> None:
        self.store.delete(named(plural), namespace, name, {"propagationPolicy": propagation})

    def log(self, pod: str, container: str, namespace: str = "corral") -> PodLog:
        """Write to it, and end it."""
        return self._logs.setdefault((namespace, pod, container), PodLog())

    def note_event(self, involved: Object, reason: str, message: str, kind: str = "Warning") -> Object:
        """A core event about an object."""
        about = involved["metadata"]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        reference = {"kind": involved.get("kind", ""), "name": about["name"], "uid": about["uid"]}
        reference |= {"namespace": about["namespace"], "apiVersion": involved.get("apiVersion", "v1")}
        body: Object = {"metadata": {"generateName": f"{about['name']}."}, "involvedObject": reference, "count": 1}
        body |= {"reason": reason, "message": message, "type": kind, "firstTimestamp": stamp, "lastTimestamp": stamp}
        return self.create("events", body, about["namespace"])

    def serve(self, name: str, port: int, address: tuple[str, int], namespace: str = "corral") -> None:
        """What is behind a port of a service; the service object has to be there too."""
        self.routes[namespace, name, str(port)] = address

    def on_change(self, hook: Hook) -> None:
        """Called with (ADDED, MODIFIED or DELETED; object) for every change from now on, in order, in one thread of its
        own: it may call the server and may take its time. What it raises is raised by `close`."""
        self._hooks.append(hook)

    def wait(self, fact: Callable[[], object], seconds: float = 30.0) -> None:
        """Until the fact holds; looked at after every change. Raises TimeoutError."""
        with self._moved:
            if not self._moved.wait_for(fact, seconds):
                raise TimeoutError(
                    f"not within {seconds} s; there are {[str(one.key) for one in self.store.history[-5:]]}"
                )

    def expire_tokens(self) -> str:
        """No old token is let in any more. The new one."""
        fresh = f"token-{uuid.uuid4().hex}"
        self.tokens = {fresh}
        return fresh

    def count(self, verb: str, resource: str = "") -> int:
        """Requests so far."""
        return sum(one.verb == verb and resource in ("", one.resource) for one in list(self.requests))

    def note(self, request: Request, call: Call | None) -> None:
        """A request came in."""
        place = (call.namespace or "", call.name) if call else ("", "")
        verb, resource = (call.verb, call.resource) if call else (request.method.lower(), "")
        who = request.headers.get("authorization", "")
        self.requests.append(Seen(time.monotonic(), verb, resource, *place, who, request.target))

    def keep_page(self, items: list[Object], version: int, start: int) -> str:
        """A token for the rest of a list."""
        token = uuid.uuid4().hex
        self._pages[token] = (items, version, start)
        return token

    def page(self, token: str) -> tuple[list[Object], int, int]:
        items, version, start = self._pages.get(token, ([], -1, 0))
        if version < self.store.floor:
            raise Refused(410, "Expired", "The provided continue parameter is too old")
        return items, version, start

    @contextmanager
    def watching(self, wake: asyncio.Event) -> Iterator[None]:
        self._watchers.add(wake)
        try:
            yield
        finally:
            self._watchers.discard(wake)

    def _changed(self, moment: Moment) -> None:
        self._moved.notify_all()
        self._wake()
        shown = "DELETED" if moment.after is None else "ADDED" if moment.before is None else "MODIFIED"
        for hook in self._hooks:
            self._calls.append(self._caller.submit(hook, shown, copy.deepcopy(moment.last)))

    def _wake(self) -> None:
        self._server.loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for event in self._watchers:
            event.set()
