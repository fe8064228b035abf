"""One HTTP client to one API server: who we are on every request, and what is tried again."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from corral import __version__
from corral.errors import ConfigError
from corral.job.backends.kuberay.credentials import Credential, Credentials, load_certificate
from corral.job.backends.kuberay.errors import KubeError, Throttled, Unauthorized, Unreachable, error_of, one_line

_LARGEST_ERROR = 1 << 20  # bytes of an error's body that are read
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)


@dataclass(frozen=True)
class Access:
    """Everything it takes to talk to one API server. server: URL, without a slash at the end. tls: None for http.
    server_name: of its certificate, when it is not the host of the URL. source: where this was found, for messages."""

    server: str
    namespace: str
    credentials: Credentials
    tls: ssl.SSLContext | None = None
    proxy: str | None = None
    server_name: str | None = None
    source: str = ""
    environment_proxy: bool = False


@dataclass(frozen=True)
class Patience:
    """Seconds. connect: of a connection. read: silence after which an answer counts as lost. retry: during which a
    call is tried again. pause, cap: first and longest wait between two tries; what the server asks for is honoured
    up to `retry`."""

    connect: float = 10.0
    read: float = 30.0
    retry: float = 20.0
    pause: float = 0.25
    cap: float = 5.0

    def pauses(self) -> Iterator[float]:
        """Growing, with jitter so that many clients of one server do not return together."""
        pause = self.pause
        while True:
            yield random.uniform(0.5, 1.0) * pause
            pause = min(self.cap, 2 * pause)


class Transport:
    """`http` may be used for other paths of the server too, such as its proxy to services."""

    def __init__(self, access: Access, patience: Patience) -> None:
        self.access = access
        self.patience = patience
        self._identity = _Identity(access)
        self.http = httpx.AsyncClient(
            auth=self._identity,
            headers={"User-Agent": f"corral/{__version__}", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(patience.read, connect=patience.connect),
            proxy=access.proxy,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),  # each watch and log holds one
            trust_env=access.environment_proxy,
            # Reading all authorities takes 20 ms; without TLS a context that trusts nobody will do.
            verify=access.tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    def headers(self) -> dict[str, str]:
        """Who we are, as last shown on a request; for a connection that `http` cannot make."""
        token = self._identity.token
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        safe: bool = False,
        quiet: bool = False,
    ) -> httpx.Response:
        """safe: doing it twice does no harm, so it is tried again even when the server may have done it already.
        Others are tried again only when the server said or cannot have known. Raises KubeError."""
        ends = time.monotonic() + self.patience.retry
        for pause in self.patience.pauses():
            try:
                async with self.stream(
                    method, path, params=params, body=body, content_type=content_type, quiet=quiet
                ) as answer:
                    await self._whole(answer, f"{method} {path}")
                    return answer
            except KubeError as error:
                wait = pause if error.retry_after is None else max(pause, error.retry_after)
                if not _worth_another(error, safe) or time.monotonic() + wait > ends:
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("pauses never end")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        quiet: bool = False,
        silence: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose body is still to come. silence: seconds without a byte after which it counts as lost.
        Raises KubeError for every answer but a good one; it is for the caller to pass reading through `lost`."""
        what = f"{method} {path}"
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if body is not None else {})
        read = self.patience.read if silence is None else (None if silence == float("inf") else silence)
        request = self.http.build_request(
            method,
            self.access.server + path,
            params=params,
            content=body,
            headers=headers,
            timeout=httpx.Timeout(self.patience.read, connect=self.patience.connect, read=read),
        )
        try:
            answer = await self.http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self.lost(what, error) from None
        try:
            if not answer.is_success:
                raise await self._refusal(answer, what, quiet)
            yield answer
        finally:
            await answer.aclose()

    def lost(self, what: str, error: Exception) -> KubeError:
        """The error of a connection that failed."""
        said = one_line(str(error)) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return KubeError(0, "Certificate", f"{what}: {self.access.source}: the server is not trusted: {said}")
        return Unreachable(
            f"{what}: {self.access.server} does not answer: {said}", sent=not isinstance(error, _NOT_SENT)
        )

    async def _whole(self, answer: httpx.Response, what: str) -> None:
        try:
            await answer.aread()
        except httpx.HTTPError as error:
            raise self.lost(what, error) from None

    async def _refusal(self, answer: httpx.Response, what: str, quiet: bool) -> KubeError:
        data = b""
        try:
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > _LARGEST_ERROR:
                    break
        except httpx.HTTPError as error:
            return self.lost(what, error)
        try:
            body: object = httpx.Response(200, content=data).json()
        except ValueError:
            body = {"message": data.decode("utf-8", "replace")}
        return error_of(what, answer.status_code, body, _seconds(answer.headers.get("Retry-After")), quiet)


class _Identity(httpx.Auth):
    """Adds who we are; on 401 renews it and asks once more."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._presented: tuple[str, str] | None = None
        self.token: str | None = None

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        if self._access.server_name:
            request.extensions = {**request.extensions, "sni_hostname": self._access.server_name}
        credential = await self._access.credentials.current()
        self._show(request, credential)
        answer = yield request
        if answer.status_code == 401:
            renewed = await self._access.credentials.renewed(credential)
            if renewed != credential:
                self._show(request, renewed)
                yield request

    def _show(self, request: httpx.Request, credential: Credential) -> None:
        self.token = credential.token
        if credential.token:
            request.headers["Authorization"] = f"Bearer {credential.token}"
        if credential.certificate and credential.certificate != self._presented and self._access.tls:
            try:
                load_certificate(self._access.tls, credential.certificate)
            except OSError as error:  # ssl.SSLError among them, and a disk that is full
                raise Unauthorized(401, "Certificate", f"{self._access.source}: client certificate: {error}") from None
            self._presented = credential.certificate
        if credential.certificate and credential.passing:
            request.headers["Connection"] = "close"


def _worth_another(error: KubeError, safe: bool) -> bool:
    if isinstance(error, Unreachable):
        return safe or not error.sent
    return isinstance(error, Throttled) or (safe and error.status >= 500)


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None  # a date: nothing an API server sends


def check_server(server: str, where: str) -> str:
    """The URL without a slash at the end. Raises ConfigError when it is none."""
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{where}: server {server!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{where}: server {server!r} is not a URL; write https://HOST:PORT")
    if url.userinfo:
        raise ConfigError(f"{where}: server holds a user name; credentials belong to the user, as a token or exec")
    return server.rstrip("/")
