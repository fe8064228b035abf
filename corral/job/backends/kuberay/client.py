"""The calls of the Kubernetes API that Corral makes. Objects are plain dictionaries, as the API has them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx

from corral.job.backends.kuberay.config import access_of
from corral.job.backends.kuberay.errors import Gone, KubeError, NotFound, error_of
from corral.job.backends.kuberay.transport import Access, Patience, Transport
from corral.job.service.settings import Kubernetes

Object = dict[str, Any]
Objects = list[Object]  # a name of its own: the client has a method `list`

_PAGE = 500  # objects of one page of a list
_LONGEST_LINE = 32 << 20  # bytes of one event of a watch
_LISTS = 3  # times a list is begun anew when its pages are too old


class Kind(NamedTuple):
    """A kind of object that lives in namespaces. group: "" for the core."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, "namespaces", quote(namespace, safe=""), self.plural]
        return "/".join(parts + [quote(part, safe="") for part in (name, subresource) if part])


RAYJOBS = Kind("ray.io", "v1", "rayjobs")
RAYCLUSTERS = Kind("ray.io", "v1", "rayclusters")
PODS = Kind("", "v1", "pods")
SECRETS = Kind("", "v1", "secrets")
SERVICES = Kind("", "v1", "services")
EVENTS = Kind("", "v1", "events")


class Listing(NamedTuple):
    """All objects of a kind as they were at resource_version."""

    items: Objects
    resource_version: str


class Change(NamedTuple):
    """type: ADDED, MODIFIED, DELETED or BOOKMARK; of a bookmark only the resource version of the object counts."""

    type: str
    object: Object


class KubeClient:
    """One connection pool to one API server. namespace: of every call that names none. Every method raises KubeError.

    A call is tried again for as long as `patience.retry` when that can do no harm: reads and deletes always, others
    when the server says that it did nothing (429) or cannot have heard of it. So a create, a replace or a patch whose
    answer is lost raises Unreachable with `sent`: look what is there, and go on from that.
    """

    def __init__(self, access: Access, patience: Patience | None = None) -> None:
        self.namespace = access.namespace
        self.transport = Transport(access, patience or Patience())

    @classmethod
    def from_settings(cls, settings: Kubernetes, patience: Patience | None = None) -> Self:
        """Raises ConfigError when there is no way to a cluster or it is described wrongly."""
        return cls(access_of(settings), patience)

    @property
    def http(self) -> httpx.AsyncClient:
        """For other paths of this server: it says who we are. See `service_url`."""
        return self.transport.http

    async def close(self) -> None:
        await self.http.aclose()

    async def create(self, kind: Kind, body: Object, *, namespace: str | None = None) -> Object:
        """Raises AlreadyExists when there is one of that name."""
        return await self._object("POST", kind, self._path(kind, namespace), body)

    async def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object:
        return await self._object("GET", kind, self._path(kind, namespace, name))

    async def replace(self, kind: Kind, body: Object, *, subresource: str = "", namespace: str | None = None) -> Object:
        """Raises Conflict when metadata.resourceVersion is not the newest."""
        return await self._object("PUT", kind, self._path(kind, namespace, body["metadata"]["name"], subresource), body)

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: Object | Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
        namespace: str | None = None,
    ) -> Object:
        """A mapping is merged into the object; a list holds the operations of a JSON patch."""
        form = "merge-patch" if isinstance(patch, dict) else "json-patch"
        body = patch if isinstance(patch, dict) else list(patch)
        path = self._path(kind, namespace, name, subresource)
        return await self._object("PATCH", kind, path, body, f"application/{form}+json")

    async def patch_status(self, kind: Kind, name: str, status: Object, *, namespace: str | None = None) -> Object:
        """Merge into the status alone."""
        return await self.patch(kind, name, {"status": status}, subresource="status", namespace=namespace)

    async def delete(
        self,
        kind: Kind,
        name: str,
        *,
        propagation: str = "Background",
        uid: str | None = None,
        resource_version: str | None = None,
        namespace: str | None = None,
    ) -> bool:
        """Ask for its end; finalisers may keep it for a while. False when there was none of that name.
        Raises Conflict when it has another uid or resource version than the one given."""
        only = {"uid": uid, "resourceVersion": resource_version}
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if preconditions := {key: value for key, value in only.items() if value is not None}:
            body["preconditions"] = preconditions
        try:
            await self._object("DELETE", kind, self._path(kind, namespace, name), body)
        except NotFound:
            return False
        return True

    async def list(self, kind: Kind, *, selector: str = "", fields: str = "", namespace: str | None = None) -> Listing:
        """All objects, page by page. selector, fields: of labels and of fields, in the notation of kubectl."""
        for _ in range(_LISTS - 1):
            try:
                return await self._list(kind, selector, fields, namespace)
            except Gone:  # pages are of one moment, and that became too old while we read them
                continue
        return await self._list(kind, selector, fields, namespace)

    async def watch(
        self,
        kind: Kind,
        resource_version: str,
        *,
        selector: str = "",
        namespace: str | None = None,
        seconds: float = 240.0,
        silence: float = 90.0,
    ) -> AsyncGenerator[Change, None]:
        """Changes after a resource version, until the server ends the watch, which says nothing. seconds: asked for.
        silence: seconds without a byte after which the connection counts as lost; bookmarks come every minute.

        Raises Gone when the server no longer knows that version, Unreachable when the connection is lost.
        """
        params = {
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        } | ({"labelSelector": selector} if selector else {})
        path = self._path(kind, namespace)
        async with (
            self.transport.stream("GET", path, params=params, silence=silence) as answer,
            aclosing(self._lines(answer, f"watch {path}")) as lines,
        ):
            async for line in lines:
                yield _change(line, f"watch {path}")

    async def pod_log(
        self,
        name: str,
        *,
        container: str | None = None,
        follow: bool = False,
        since: datetime | None = None,
        timestamps: bool = False,
        limit_bytes: int | None = None,
        previous: bool = False,
        silence: float | None = None,
        namespace: str | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Chunks as they come; they may end in the middle of a line. The end of a followed log says nothing about the
        container. Without `silence` a followed log may be quiet for ever."""
        params = {
            "container": container,
            "follow": "true" if follow else None,
            "timestamps": "true" if timestamps else None,
            "previous": "true" if previous else None,
            "sinceTime": since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since else None,
            "limitBytes": str(limit_bytes) if limit_bytes is not None else None,
        }
        path = self._path(PODS, namespace, name, "log")
        given = {key: value for key, value in params.items() if value is not None}
        quiet_for = silence if silence is not None or not follow else float("inf")
        async with self.transport.stream("GET", path, params=given, silence=quiet_for) as answer:
            try:
                async for chunk in answer.aiter_bytes():
                    yield chunk
            except httpx.HTTPError as error:
                raise self.transport.lost(f"log {path}", error) from None

    async def events(self, involved: Object, *, namespace: str | None = None) -> Objects:
        """What was noted about an object, the oldest first."""
        found = await self.list(EVENTS, fields=f"involvedObject.uid={involved['metadata']['uid']}", namespace=namespace)
        return sorted(found.items, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def service_url(self, name: str, port: int | str, *, namespace: str | None = None) -> str:
        """URL of an HTTP service through the API server, for `http`; without a slash at the end."""
        return f"{self.transport.access.server}{self._path(SERVICES, namespace, f'http:{name}:{port}')}/proxy"

    def _path(self, kind: Kind, namespace: str | None, name: str = "", subresource: str = "") -> str:
        return kind.path(namespace or self.namespace, name, subresource)

    async def _list(self, kind: Kind, selector: str, fields: str, namespace: str | None) -> Listing:
        params = {"limit": str(_PAGE)}
        params |= {"labelSelector": selector} if selector else {}
        params |= {"fieldSelector": fields} if fields else {}
        items: Objects = []
        while True:
            page = await self._object("GET", kind, self._path(kind, namespace), params=params)
            items += page.get("items") or []
            about = page.get("metadata") or {}
            if not about.get("continue"):
                return Listing(items, str(about.get("resourceVersion") or ""))
            params["continue"] = about["continue"]

    async def _object(
        self,
        method: str,
        kind: Kind,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        answer = await self.transport.send(
            method,
            path,
            params=params,
            body=None if body is None else json.dumps(body).encode(),
            content_type=content_type,
            safe=method in ("GET", "DELETE"),
            quiet=kind == SECRETS,
        )
        return _parsed(answer.content, f"{method} {path}", answer.status_code)

    async def _lines(self, answer: httpx.Response, what: str) -> AsyncGenerator[bytes, None]:
        rest = b""
        try:
            async for chunk in answer.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line
                if len(rest) > _LONGEST_LINE:
                    raise KubeError(0, "TooLarge", f"{what}: an event has more than {_LONGEST_LINE} bytes")
        except httpx.HTTPError as error:
            raise self.transport.lost(what, error) from None
        if rest.strip():
            raise self.transport.lost(what, EOFError("the stream ended in the middle of an event"))


def _parsed(data: bytes, what: str, status: int) -> Object:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise KubeError(
            status, "NotKubernetes", f"{what}: the answer is no JSON object; is this a Kubernetes API server?"
        )
    return found


def _change(line: bytes, what: str) -> Change:
    found = _parsed(line, what, 200)
    kind, thing = found.get("type"), found.get("object")
    if not isinstance(kind, str) or not isinstance(thing, dict):
        raise KubeError(200, "NotKubernetes", f"{what}: an event without type and object")
    if kind == "ERROR":
        raise error_of(what, int(thing.get("code") or 500), thing)
    return Change(kind, thing)
