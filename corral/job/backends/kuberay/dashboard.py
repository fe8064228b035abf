"""The way from here to the Ray dashboard of a RayJob's cluster, and what its Jobs API last said of the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.errors import InfraError
from corral.job.backends.kuberay.client import KubeClient
from corral.job.backends.kuberay.status import SILENT, UNASKED, UNKNOWN, Answer, Heard, known, text
from corral.job.backends.ray_jobs.api import JobsApi
from corral.job.backends.ray_jobs.backend import token_of
from corral.job.service.settings import Kubernetes

PORT = 8265
ANSWER = 4.0  # seconds that one question may take


class Dashboards:
    """One client for each RayCluster. Call `forget` when a submission is over."""

    def __init__(self, settings: Kubernetes, client: KubeClient) -> None:
        self._proxied, self._client = settings.dashboard == "proxy", client
        self._token = token_of(settings.token_file, "kubernetes.token_file")
        self._apis: dict[str, tuple[str, JobsApi]] = {}

    def of(self, submission_id: str, rayjob: Mapping[str, Any]) -> JobsApi | None:
        """None: the cluster has no dashboard yet, or none any more."""
        address = self._address(rayjob.get("status") or {})
        if address is None:
            return None
        known = self._apis.get(submission_id)
        if known is None or known[0] != address:
            known = self._apis[submission_id] = address, self._api(address)
        return known[1]

    def _api(self, address: str) -> JobsApi:
        """Through the API server, that gets its own token as Authorization, and Ray's is passed on beside it."""
        if not self._proxied:
            return JobsApi(address, self._token)
        to = self._client.transport
        return JobsApi(address, self._token, headers=to.headers, http=to.http, tls=to.access.tls)

    def token(self) -> str | None:
        """What the Ray clusters ask for; None: nothing. Raises InfraError when it cannot be read now."""
        return None if self._token is None else self._token()

    async def forget(self, submission_id: str) -> None:
        known = self._apis.pop(submission_id, None)
        if known is not None:
            await known[1].close()

    def _address(self, status: Mapping[str, Any]) -> str | None:
        url = text(status, "dashboardURL")
        if not url:
            return None
        if not self._proxied:
            return url if "://" in url else f"http://{url}"
        host, _, port = url.rpartition("://")[2].partition("/")[0].rpartition(":")
        service, _, rest = (host or port).partition(".")
        return self._client.service_url(service, port or PORT, namespace=rest.partition(".")[0] or None)


@dataclass
class Question:
    """What the Jobs API says of one submission. It is asked in the background, so that a dashboard that hangs holds up
    nobody: an answer that takes too long is what was said before, and silence after `bound` seconds."""

    submission_id: str
    bound: float = ANSWER
    heard: Heard = UNASKED
    silent_since: float | None = None
    _asked_at: float = float("-inf")
    _asking: asyncio.Task[None] | None = field(default=None, repr=False)

    async def ask(self, api: JobsApi | None, again: float, wait: float) -> Heard:
        """again: seconds for which an answer that the job runs is good. wait: seconds to wait for a new one."""
        if self.heard.job is not None and self.heard.job.over:
            return self.heard
        running = self.heard.job is not None and self.heard.job.status == "RUNNING"
        if self._asking is None and not (running and time.monotonic() - self._asked_at < again):
            self._asking = asyncio.create_task(self._ask(api), name=f"ask about {self.submission_id}")
        if self._asking is not None and self.heard is not SILENT:  # nobody waits for one that is known to be silent
            await asyncio.wait([self._asking], timeout=wait)
        return SILENT if self.heard.answer is Answer.UNASKED else self.heard

    @property
    def silent(self) -> float:
        """Seconds since it last answered, 0.0 when it does."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, api: JobsApi | None) -> None:
        self._asked_at = time.monotonic()
        try:
            self._take(await self._answer(api))
        finally:
            self._asking = None

    async def _answer(self, api: JobsApi | None) -> Heard:
        if api is None:
            return SILENT
        try:
            async with asyncio.timeout(self.bound):
                job = await api.get(self.submission_id)
        except (InfraError, TimeoutError):
            return SILENT
        return UNKNOWN if job is None else known(job)

    def _take(self, heard: Heard) -> None:
        if heard is not SILENT:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = time.monotonic()
        self.heard = heard
