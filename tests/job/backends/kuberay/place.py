"""A KubeRay backend over a Kubernetes of our own: API server, operator, and containers without Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.job.backends.kuberay.backend import Bounds, KubeRayBackend
from corral.job.backends.kuberay.informer import Pace
from corral.job.backends.kuberay.transport import Patience
from corral.job.service.settings import Kubernetes, Nodes, Settings
from tests.job.backends.contract import DeafService, Place
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.containers import LightContainers
from tests.job.backends.kube.operator import OperatorSimulator

FAST = Bounds(look=0.1, fresh=0.2, wait=0.5, answer=1.0, silence=0.5, head=0.3, events=0.1, removal=20.0)
QUICK = Patience(retry=1.5, pause=0.02, cap=0.2)
BRISK = Pace(floor=0.02, pause=0.05, cap=0.5)


@dataclass
class Kubernetes_:
    """kube, operator, containers: see there. settings: of services that use it. backends: all that were made. pace: of
    those that are made from now on."""

    kube: FakeKube
    operator: OperatorSimulator
    containers: LightContainers
    settings: Settings
    url: str
    folder: Path
    pace: Pace = BRISK
    backends: list[KubeRayBackend] = field(default_factory=list)

    def make(self, bounds: Bounds = FAST, **changes: Any) -> KubeRayBackend:
        settings = replace(self.settings, kubernetes=replace(self.settings.kubernetes, **changes))
        backend = KubeRayBackend(settings, pace=self.pace, patience=QUICK, bounds=bounds)
        self.backends.append(backend)
        return backend

    @property
    def place(self) -> Place:
        return Place(self.make, self.url, self.folder)

    def nothing_left(self) -> None:
        """Of any submission."""
        for plural in ("rayjobs", "rayclusters", "pods", "secrets"):
            assert self.kube.objects(plural) == [], plural

    def run(self, life: Callable[[], Any]) -> None:
        """In a loop of its own; backends are closed as a service ends."""

        async def whole() -> None:
            try:
                await life()
            finally:
                made, self.backends[:] = self.backends[:], []
                for backend in made:
                    await backend.close()

        asyncio.run(whole())


@contextmanager
def kubernetes(tmp_path: Path, *, runs: bool = True, **changes: Any) -> Iterator[Kubernetes_]:
    """runs: jobs are processes. changes: of Settings.kubernetes."""
    (tmp_path / "work").mkdir()
    with FakeKube() as kube, DeafService() as service:
        containers = LightContainers(runs=runs)
        settings = Settings(
            data_dir=tmp_path / "data",
            backend="kuberay",
            devices=16,
            nodes=Nodes(agent_dir=str(tmp_path / "nodes"), python=sys.executable),
            kubernetes=Kubernetes(
                kubeconfig=kube.kubeconfig(tmp_path / "kubeconfig"),
                **{"image": "registry.example/corral:cpu", **changes},
            ),
        )
        with OperatorSimulator(kube, containers) as operator:
            yield Kubernetes_(kube, operator, containers, settings, service.url, tmp_path / "work")
