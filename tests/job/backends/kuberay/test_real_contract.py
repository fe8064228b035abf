"""The contract of all backends, with a real Ray cluster for each RayJob."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.job.backends.base import ANY, Placement
from corral.job.backends.kuberay.backend import KubeRayBackend
from corral.job.protocol.agent import AgentSpec
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Kubernetes, Nodes, Settings
from tests.job.backends.contract import BackendContract, DeafService, Place, until
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.operator import OperatorSimulator
from tests.job.backends.kube.real import RealContainers

pytestmark = pytest.mark.slow

STARTED = 240.0  # seconds until a Ray head is up, on a busy machine: more than the contract waits


class Patient(KubeRayBackend):
    """Comes back from `provision` when Ray has the job."""

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
        await super().provision(spec, resources, placement)

        async def given() -> bool:
            rayjob = await self._cluster.newest(spec.submission_id)
            return rayjob is None or bool(rayjob["spec"].get("jobId"))

        await until(given, STARTED)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "work").mkdir()
    with FakeKube() as kube, DeafService() as service, OperatorSimulator(kube, RealContainers()):
        settings = Settings(
            data_dir=tmp_path / "data",
            backend="kuberay",
            nodes=Nodes(agent_dir=str(tmp_path / "nodes"), python=sys.executable),
            kubernetes=Kubernetes(kubeconfig=kube.kubeconfig(tmp_path / "kubeconfig"), image="corral:test"),
        )
        yield Place(lambda: Patient(settings), service.url, tmp_path / "work")


class TestKubeRayBackendOnRay(BackendContract):
    pass
