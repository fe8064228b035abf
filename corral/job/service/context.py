"""What the routes work with: one per app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from corral.job.backends.base import Backend
from corral.job.core.clock import Clock
from corral.job.protocol.agent import EndRecord, Heartbeat, Orders
from corral.job.service.journal import Journal
from corral.job.service.metrics import Metrics
from corral.job.service.settings import Settings
from corral.job.service.tokens import TokenFile
from corral.job.service.watch import Watchers
from corral.job.store.bundles import Bundles


class Reconciler(Protocol):
    """What moves jobs on (`runner.Runner`), as far as requests reach it."""

    backend: Backend

    def wake(self) -> None:
        """Look at the jobs now, not at the next tick."""

    async def heartbeat(self, job_id: str, heard: Heartbeat) -> Orders:
        """An agent is alive."""

    async def end(self, job_id: str, record: EndRecord) -> None:
        """A command is over."""


@dataclass(frozen=True)
class Service:
    """tokens: None when none are asked for. agent_key: what agents' tokens are derived from."""

    settings: Settings
    journal: Journal
    runner: Reconciler
    bundles: Bundles
    clock: Clock
    tokens: TokenFile | None
    agent_key: bytes
    watchers: Watchers
    metrics: Metrics


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
