"""What a request means, and the answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.job.backends.kube import discovery, selectors
from tests.job.backends.kube.faults import AFTER, BEFORE, Fault
from tests.job.backends.kube.http import Exchange, Request
from tests.job.backends.kube.podlogs import follow
from tests.job.backends.kube.proxy import forward
from tests.job.backends.kube.store import Kind, Object, Refused, kind_of
from tests.job.backends.kube.watching import Watch, status_object

if TYPE_CHECKING:
    from tests.job.backends.kube.api import FakeKube

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_PATCHES = ("application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass(frozen=True)
class Call:
    """namespace: "" of what lives in none, None for all. resource: the plural, with /subresource."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""
    rest: tuple[str, ...] = ()

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


def call_of(request: Request) -> Call | None:
    """None for paths that are no objects."""
    match request.path:
        case ["api", "v1", *rest] if rest:
            group, version = "", "v1"
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            return None
    match rest:
        case ["namespaces"] | ["namespaces", _]:
            place: str | None = ""
            plural, *more = rest
        case ["namespaces", place, plural, *more]:
            pass
        case [plural, *more]:
            place = None
    name, subresource, *further = [*more, "", ""][: max(2, len(more))]
    kind = Kind(group, version, plural)
    if request.method == "GET":
        watched = request.query.get("watch") in ("true", "1")
        verb = ("watch" if watched else "list") if not name else {"log": "log"}.get(subresource, "get")
    else:
        verb = _VERBS.get(request.method, request.method.lower())
    if subresource == "proxy":
        verb = "proxy"
    return Call(verb, kind, place, name, subresource, tuple(further))


class Routes:
    """The handler of a FakeKube's server."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    async def __call__(self, request: Request, exchange: Exchange) -> None:
        call = call_of(request)
        self._kube.note(request, call)
        try:
            if not self._known(request):
                raise Refused(401, "Unauthorized", "Unauthorized")
            if call is None:
                await exchange.answer(200, discovery.document(request.path))
                return
            broken = await self._before(call, exchange)
            if broken is None:
                await self._serve(request, call, exchange)
            elif broken.effect == "status":
                extra = {"retryAfterSeconds": broken.retry_after} if broken.retry_after is not None else {}
                headers = {} if broken.retry_after is None else {"Retry-After": str(broken.retry_after)}
                await exchange.answer(
                    broken.status, status_object(broken.status, broken.reason, "on purpose", **extra), headers
                )
            else:
                await exchange.until_closed()
        except Refused as refused:
            await exchange.answer(refused.status, status_object(refused.status, refused.reason, refused.message))

    def _known(self, request: Request) -> bool:
        tokens = self._kube.tokens
        return not tokens or request.headers.get("authorization", "").removeprefix("Bearer ") in tokens

    async def _before(self, call: Call, exchange: Exchange) -> Fault | None:
        broken = None
        for fault in self._kube.faults.take(BEFORE, call.verb, call.resource, call.name):
            if fault.effect == "slow":
                await asyncio.sleep(fault.seconds)
            else:
                broken = fault
        return broken

    async def _serve(self, request: Request, call: Call, exchange: Exchange) -> None:
        if call.verb == "watch":
            await self._watch(request, call, exchange)
        elif call.verb == "log":
            await self._log(request, call, exchange)
        elif call.verb == "proxy":
            await self._proxy(request, call, exchange)
        else:
            status, body = self._object(request, call)
            for fault in self._kube.faults.take(AFTER, call.verb, call.resource, call.name):
                if fault.effect == "lost":
                    exchange.abort()
                else:
                    await exchange.answer(status, body, part=0.5)
                return
            await exchange.answer(status, body)

    def _object(self, request: Request, call: Call) -> tuple[int, Object]:
        store, kind, name = self._kube.store, call.kind, call.name
        if call.verb == "list":
            return 200, self._list(request, call)
        place = call.namespace or ""
        if call.subresource not in ("", "status"):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if call.verb == "get":
            return 200, store.get(kind, place, name)
        body = _body(request)
        if call.verb == "create":
            return 201, store.create(kind, place, _mapping(body, kind))
        if call.verb == "update":
            return 200, store.replace(kind, place, name, _mapping(body, kind), call.subresource)
        if call.verb == "patch":
            form = request.headers.get("content-type", "").split(";")[0]
            if form not in _PATCHES:
                raise Refused(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {form}")
            if isinstance(body, list) is not (form == _PATCHES[0]):
                raise Refused(400, "BadRequest", f"the body is no {form}")
            return 200, store.patch(kind, place, name, body, call.subresource)
        if call.verb == "delete" and name:
            gone = store.delete(kind, place, name, body)
            if "deletionTimestamp" in gone["metadata"]:
                return 200, gone
            details = {"name": name, "kind": kind.plural, "uid": gone["metadata"]["uid"]}
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details}
        raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, request: Request, call: Call) -> Object:
        back = sum(fault.back for fault in self._kube.faults.take({"stale"}, "list", call.resource, ""))
        asked = request.query
        items, version = self._kube.store.list(call.kind, call.namespace, _matches(asked), back)
        about: Object = {"resourceVersion": str(version)}
        limit, start = int(asked.get("limit") or 0), 0
        if token := asked.get("continue"):
            items, version, start = self._kube.page(token)
            about["resourceVersion"] = str(version)
        if limit and len(items) > start + limit:
            about["continue"] = self._kube.keep_page(items, version, start + limit)
            about["remainingItemCount"] = len(items) - start - limit
        shown = items[start : start + limit] if limit else items[start:]
        return {
            "kind": f"{kind_of(call.kind.plural)}List",
            "apiVersion": call.kind.api_version,
            "metadata": about,
            "items": shown,
        }

    async def _watch(self, request: Request, call: Call, exchange: Exchange) -> None:
        asked, store = request.query, self._kube.store
        matches = _matches(asked)
        first: list[Object] = []
        version = asked.get("resourceVersion", "")
        if version in ("", "0"):
            first, now = store.list(call.kind, call.namespace, matches)
            version = str(now)
        if not version.isdecimal():
            raise Refused(400, "BadRequest", f"invalid resource version {version!r}")
        watch = Watch(
            store,
            self._kube.faults,
            exchange,
            call.kind,
            call.namespace,
            matches,
            cursor=int(version),
            seconds=float(asked.get("timeoutSeconds") or 1800),
            bookmarks=self._kube.bookmark_seconds if asked.get("allowWatchBookmarks") == "true" else None,
        )
        with self._kube.watching(watch.wake):
            await watch.run(first)

    async def _log(self, request: Request, call: Call, exchange: Exchange) -> None:
        pod = self._kube.store.get(call.kind, call.namespace or "", call.name)
        names = [container["name"] for container in (pod.get("spec") or {}).get("containers") or []]
        container = request.query.get("container") or (names[0] if len(names) == 1 else "")
        if not container:
            raise Refused(
                400, "BadRequest", f"a container name must be specified for pod {call.name}, choose one of: {names}"
            )
        if names and container not in names:
            raise Refused(400, "BadRequest", f"container {container} is not valid for pod {call.name}")
        log = self._kube.log(call.name, container, call.namespace or "")
        if request.query.get("follow") == "true":
            await follow(log, request.query, exchange)
            return
        data, _ = log.part(request.query)
        await exchange.answer(200, data[: int(request.query.get("limitBytes", len(data)))])

    async def _proxy(self, request: Request, call: Call, exchange: Exchange) -> None:
        name, _, port = call.name.removeprefix("http:").partition(":")
        self._kube.store.get(call.kind, call.namespace or "", name)
        address = self._kube.routes.get((call.namespace or "", name, port))
        _, _, target = request.target.partition("/proxy")
        if address is None or not await forward(request, exchange, address, target or "/"):
            raise Refused(503, "ServiceUnavailable", f'no endpoints available for service "{call.name}"')


def _matches(query: Mapping[str, str]) -> selectors.Matches:
    try:
        labels = selectors.labels(query.get("labelSelector", ""))
        fields = selectors.fields(query.get("fieldSelector", ""))
    except ValueError as error:
        raise Refused(400, "BadRequest", str(error)) from None
    return lambda thing: labels(thing) and fields(thing)


def _body(request: Request) -> Any:
    try:
        return request.json()
    except ValueError as error:
        raise Refused(400, "BadRequest", f"the body is no JSON: {error}") from None


def _mapping(body: Any, kind: Kind) -> Object:
    if not isinstance(body, dict):
        raise Refused(400, "BadRequest", "the body is no object")
    if kind.group and not body.get("kind"):
        raise Refused(400, "BadRequest", "Object 'Kind' is missing")
    if body.get("apiVersion", "" if kind.group else kind.api_version) != kind.api_version:
        said = f"the API version in the data ({body.get('apiVersion')}) does not match the expected {kind.api_version}"
        raise Refused(400, "BadRequest", said)
    return body
