"""A client of a FakeKube that has little patience, and waiting for facts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from corral.job.backends.kuberay.client import KubeClient
from corral.job.backends.kuberay.credentials import Credential, Credentials, Fixed
from corral.job.backends.kuberay.informer import Pace
from corral.job.backends.kuberay.transport import Access, Patience
from tests.job.backends.kube.api import FakeKube

T = TypeVar("T")

QUICK = Patience(connect=2.0, read=0.3, retry=1.0, pause=0.01, cap=0.05)
BRISK = Pace(floor=0.01, pause=0.01, cap=0.05, resync=0.3, watch=1.0, silence=0.3)
BOUND = 30.0  # seconds a fact may take on a machine that does much else


def run(life: Callable[[], Awaitable[T]]) -> T:
    """In a loop of its own, which must have no task left afterwards."""

    async def bounded() -> T:
        result = await asyncio.wait_for(life(), BOUND)
        # Generators that were left early are closed by the loop, in tasks of a moment.
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, 5)
        return result

    return asyncio.run(bounded())


@asynccontextmanager
async def client_of(
    kube: FakeKube, credentials: Credentials | None = None, patience: Patience = QUICK
) -> AsyncIterator[KubeClient]:
    """In namespace corral. Afterwards no connection is left."""
    token = min(kube.tokens) if kube.tokens else None
    client = KubeClient(Access(kube.url, "corral", credentials or Fixed(Credential(token))), patience)
    try:
        yield client
    finally:
        await client.close()
    await until(lambda: kube.connections == 0)


async def until(fact: Callable[[], object], seconds: float = BOUND) -> None:
    async with asyncio.timeout(seconds):
        while not fact():
            await asyncio.sleep(0.005)
