"""Around the whole app: foreign browsers stay out, each request is measured and logged, no exception gets out."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corral.job.service.errors import Refusal

log = logging.getLogger("corral.service")
_QUIET = ("/healthz", "/readyz", "/metrics", "/api/v1/agent/")


class StreamCut(Exception):
    """Raised inside a response that must not look whole to its reader: the connection is closed in the middle."""


class Gate:
    """allowed_hosts: names in the Host header that are ours, None for any. Without tokens a page in a browser on this
    machine could otherwise reach us under a name of its own that resolves to loopback (DNS rebinding).
    observe(method, route, status, seconds): called when a request is over."""

    def __init__(
        self, app: ASGIApp, allowed_hosts: frozenset[str] | None, observe: Callable[[str, str, int, float], None]
    ) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts
        self.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun = 0, time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        try:
            if refusal := self._refusal(Headers(scope=scope)):
                await refusal.response()(scope, receive, noted)
            else:
                await self.app(scope, receive, noted)
        except StreamCut:
            raise
        except Exception as error:
            number = secrets.token_hex(4)
            log.exception("internal error %s", number, extra=_facts(scope) | {"error_id": number})
            if status:
                raise StreamCut from error
            await Refusal(500, f"internal error {number}").response()(scope, receive, noted)
        finally:
            self._record(scope, status, time.monotonic() - begun)

    def _refusal(self, headers: Headers) -> Refusal | None:
        host = host_name(headers.get("host", ""))
        if self.allowed_hosts is not None and host not in self.allowed_hosts and not is_loopback(host):
            return Refusal(403, f"host {host[:80]!r} is not this service; without a token file it answers to loopback")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            return Refusal(403, "requests from pages of other sites are refused")
        if headers.get("sec-fetch-site") in {"cross-site", "same-site"}:
            return Refusal(403, "requests from pages of other sites are refused")
        return None

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self.observe(scope["method"], route, status, seconds)
        level = logging.DEBUG if scope["path"].startswith(_QUIET) and status < 500 else logging.INFO
        log.log(level, "request", extra=_facts(scope) | {"status": status, "seconds": round(seconds, 4)})


def host_name(header: str) -> str:
    """The name or address in a Host header, without port and brackets, in lower case; "" when there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def _facts(scope: Scope) -> dict[str, object]:
    state = scope.get("state", {})
    facts = {"method": scope["method"], "path": scope["path"][:200]}
    return facts | {key: state[key] for key in ("job_id", "caller") if key in state}
