"""The calls of a service, each with its retries, and what a refusal means to the user."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from corral import __version__
from corral.errors import ConfigError, InfraError
from corral.job.client.bundle import Bundle
from corral.job.client.endpoint import Endpoint
from corral.job.client.text import one_line
from corral.job.protocol.submit import SubmitRequest, Submitted
from corral.job.protocol.verdict import UNAUTHORISED_EXIT, UNREACHABLE_EXIT
from corral.job.protocol.views import DryRun, EventList, JobList, JobView, LeaseView, Sweep

M = TypeVar("M", bound=BaseModel)

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK = 1 << 18


class UnreachableError(InfraError):
    """The service does not answer."""

    exit_code = UNREACHABLE_EXIT


class UnauthorisedError(ConfigError):
    """The service does not know our token, or the token may not do this."""

    exit_code = UNAUTHORISED_EXIT


class AbsentError(ConfigError):
    """The service does not know the job."""


class BusyError(InfraError):
    """The service answers, but not now. `after`: seconds it asks us to wait."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


@dataclass(frozen=True)
class Patience:
    """Seconds. connect: of a connection. read: silence after which a connection counts as lost (keep-alives come every
    15 s). first: retries until the service has answered once. reconnect: retries after that. cap: longest pause."""

    connect: float = 10.0
    read: float = 45.0
    first: float = 10.0
    reconnect: float = 600.0
    pause: float = 0.1
    cap: float = 5.0

    @classmethod
    def of(cls, reconnect: float) -> Self:
        return cls(first=min(cls.first, reconnect), reconnect=reconnect)

    def pauses(self) -> Iterator[float]:
        """Growing, with jitter so that many clients of one restarted service do not return together."""
        pause = self.pause
        while True:
            yield random.uniform(0.5, 1.0) * pause
            pause = min(self.cap, 2 * pause)


class Api:
    """One connection pool to one service."""

    def __init__(self, endpoint: Endpoint, patience: Patience | None = None) -> None:
        self.endpoint = endpoint
        self.patience = patience or Patience()
        headers = {"User-Agent": f"corral/{__version__}", "Accept-Encoding": "identity"}
        if endpoint.token:
            headers["Authorization"] = f"Bearer {endpoint.token}"
        wait = httpx.Timeout(self.patience.read, connect=self.patience.connect)
        # A proxy of the environment never sees what is meant for this machine. Redirects are not followed: the token
        # is for this service only.
        local = endpoint.loopback and endpoint.url.startswith("http:")
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            headers=headers,
            timeout=wait,
            trust_env=not endpoint.loopback,
            # Reading all authorities takes 20 ms; here no TLS is spoken, and this context trusts nobody.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if local else True,
        )
        self._answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def job_url(self, job_id: str) -> str:
        return f"{self.endpoint.url}{_job(job_id)}"

    async def has_bundle(self, digest: str) -> bool:
        answer = await self._retried("HEAD", f"/api/v1/bundles/{digest}", absent_is_fine=True)
        return answer.status_code != 404

    async def put_bundle(self, bundle: Bundle) -> None:
        async def attempt() -> httpx.Response:
            async def chunks() -> AsyncIterator[bytes]:
                with bundle.path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        yield chunk

            headers = {"Content-Length": str(bundle.size), "Content-Type": "application/gzip"}
            return await self._http.put(f"/api/v1/bundles/{bundle.digest}", content=chunks(), headers=headers)

        await self._persist(attempt)

    async def submit(self, request: SubmitRequest, key: str) -> Submitted:
        """A lost answer is asked for again with the same key, which never makes a second job."""
        return _parsed(await self._post_job(request, key), Submitted)

    async def dry_run(self, request: SubmitRequest, key: str) -> DryRun:
        return _parsed(await self._post_job(request.model_copy(update={"dry_run": True}), key), DryRun)

    async def _post_job(self, request: SubmitRequest, key: str) -> httpx.Response:
        body = request.model_dump(mode="json", exclude_unset=True)
        return await self._retried("POST", "/api/v1/rayjobs", json=body, headers={"Idempotency-Key": key})

    async def job(self, job_id: str) -> JobView:
        return _parsed(await self._retried("GET", _job(job_id)), JobView)

    async def jobs(self, filters: dict[str, str]) -> list[JobView]:
        """The newest that fit, one page."""
        return _parsed(await self._retried("GET", "/api/v1/rayjobs", params=filters), JobList).jobs

    async def events(self, job_id: str, after_seq: int) -> EventList:
        params = {"after_seq": str(after_seq)}
        return _parsed(await self._retried("GET", f"{_job(job_id)}/events", params=params), EventList)

    async def cancel(self, job_id: str) -> JobView:
        return _parsed(await self._retried("POST", f"{_job(job_id)}/cancel"), JobView)

    async def heartbeat(self, job_id: str) -> LeaseView:
        """Renew the lease, without a retry: the next one is due soon. Raises as `_checked`, and httpx.RequestError."""
        answer = await self._http.post(f"{_job(job_id)}/heartbeat")
        _checked(answer)
        return _parsed(answer, LeaseView)

    async def clean_up(self, run_id: str, attempt: int | None) -> Sweep:
        params = {} if attempt is None else {"attempt": str(attempt)}
        path = f"/api/v1/workflows/{quote(run_id, safe='')}"
        return _parsed(await self._retried("DELETE", path, params=params), Sweep)

    def logs(self, job_id: str, params: dict[str, str]) -> AbstractAsyncContextManager[httpx.Response]:
        """What a job printed, as text that is read as it comes."""
        return self.stream(f"{_job(job_id)}/logs", params)

    @asynccontextmanager
    async def stream(self, path: str, params: dict[str, str]) -> AsyncIterator[httpx.Response]:
        """An answer whose body is read as it comes. Raises as `_checked`, and httpx.RequestError."""
        async with self._http.stream("GET", path, params=params) as answer:
            if answer.status_code >= 300:
                await answer.aread()
            _checked(answer)
            self._answered = True
            yield answer

    async def _retried(
        self,
        method: str,
        path: str,
        *,
        absent_is_fine: bool = False,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        json: object = None,
    ) -> httpx.Response:
        async def attempt() -> httpx.Response:
            return await self._http.request(method, path, params=params, headers=headers, json=json)

        return await self._persist(attempt, absent_is_fine)

    async def _persist(
        self, attempt: Callable[[], Awaitable[httpx.Response]], absent_is_fine: bool = False
    ) -> httpx.Response:
        """Try until there is an answer that is not "busy". Raises UnreachableError, BusyError, or as `_checked`."""
        start = time.monotonic()
        for pause in self.patience.pauses():
            try:
                answer = await attempt()
                self._answered = True
                if not (absent_is_fine and answer.status_code == 404):
                    _checked(answer)
                return answer
            except httpx.RequestError as error:
                problem: InfraError = UnreachableError(
                    f"no answer from the service at {self.endpoint.url}: {reason(error)}; is `corral serve` running "
                    "there? --url or CORRAL_URL names another, --on in `corral e2e`"
                )
            except BusyError as error:
                problem, pause = error, max(pause, min(error.after, 30.0))
            limit = self.patience.reconnect if self._answered else self.patience.first
            if time.monotonic() - start + pause > limit:
                raise problem
            await asyncio.sleep(pause)
        raise AssertionError  # pauses() has no end


def reason(error: httpx.RequestError) -> str:
    """One line for a lost connection; httpx leaves the text of some errors empty."""
    return one_line(str(error)) or type(error).__name__


def _job(job_id: str) -> str:
    return f"/api/v1/rayjobs/{quote(job_id, safe='')}"


def _parsed(answer: httpx.Response, model: type[M]) -> M:
    """Raises InfraError for what no service answers, such as a login page on the way."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError:
        url = answer.url.copy_with(query=None)
        raise InfraError(f"{url} answers what is no {model.__name__}; is the URL the service's own?") from None


def _checked(answer: httpx.Response) -> None:
    """Raises UnauthorisedError (401, 403), AbsentError (404), BusyError (429, 5xx) or ConfigError for a refusal."""
    status = answer.status_code
    if 200 <= status < 300:
        return
    said = _said(answer)
    if status in (401, 403):
        raise UnauthorisedError(f"the service refuses ({status}): {said}; check CORRAL_TOKEN and its scopes")
    if status == 404:
        raise AbsentError(f"not found: {said}")
    if status in _BUSY:
        after = answer.headers.get("Retry-After", "")
        raise BusyError(f"the service cannot now ({status}): {said}", float(after) if after.isdecimal() else 0.0)
    if 300 <= status < 400:
        raise ConfigError(f"the service redirects ({status}) to another address; give its final URL with --url")
    raise ConfigError(f"the service refuses ({status}): {said}")


def _said(answer: httpx.Response) -> str:
    try:
        content = answer.json()
    except ValueError:
        content = None
    text = content.get("error") or content.get("detail") if isinstance(content, dict) else None
    return one_line(str(text or answer.reason_phrase or "no reason given"))[:1000]
