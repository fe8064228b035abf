"""The contract of all backends, on a real Ray head."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.service.settings import Nodes, RayCluster, Settings
from tests.job.backends.contract import BackendContract, DeafService, Place
from tests.job.backends.ray_jobs.head import Head, ray_head

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as it:
        yield it


@pytest.fixture
def place(tmp_path: Path, head: Head) -> Iterator[Place]:
    (tmp_path / "work").mkdir()
    settings = Settings(
        data_dir=tmp_path / "data",
        backend="ray",
        ray=RayCluster(address=head.address),
        nodes=Nodes(agent_dir=str(tmp_path / "nodes"), python=sys.executable),
    )
    with DeafService() as service:
        yield Place(lambda: RayJobsBackend(settings), service.url, tmp_path / "work")

    async def end() -> None:
        backend = RayJobsBackend(settings)
        for name in await backend.list_owned():
            await backend.destroy(name)

    asyncio.run(end())


class TestRayJobsBackend(BackendContract):
    pass
