"""A job service over a Kubernetes of our own, whose jobs run only as far as a test says; time is turned by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from corral.job.backends.kuberay.backend import KubeRayBackend
from corral.job.core.record import JobRecord
from corral.job.protocol.states import JobState
from corral.job.protocol.verdict import Verdict
from tests.job.backends.kube.dashboard import FakeDashboard
from tests.job.backends.kuberay.place import FAST, Kubernetes_
from tests.job.service.reconciling import BOUND, Hand, World, end_record, until

STEP, PAUSE = 0.5, 0.02  # seconds of the clock that is turned, and of real time meanwhile
MODES = ("K8sJobMode", "HTTPMode", "SidecarMode")


@dataclass
class Scene:
    """it: the cluster. world: the service. job: of the one job there is; name: of its RayJob."""

    it: Kubernetes_
    world: World
    backend: KubeRayBackend
    job: str = ""

    @property
    def name(self) -> str:
        return f"{self.job}-a{self.world.job(self.job).attempt}"

    @property
    def head(self) -> FakeDashboard:
        return self.it.containers.every[-1]

    async def submit(self, **fields: Any) -> None:
        self.job = await self.world.submit(1, **fields)

    async def until(self, fact: Callable[[], object], what: str = "") -> None:
        """The clock turns a little meanwhile: what failed is tried again only after a while."""

        end = time.monotonic() + BOUND
        while not fact():
            assert time.monotonic() < end, f"{what}: {self.world.job(self.job)} {self.status()}"
            self.world.hand.time += STEP / 2
            await asyncio.sleep(PAUSE)

    def status(self) -> dict[str, Any]:
        """Of the RayJob."""
        found = self.it.kube.find("rayjobs", self.name) or {}
        return dict(found.get("status") or {})

    async def is_in(self, deployment: str, job: str | None = None) -> None:
        def there() -> bool:
            status = self.status()
            return status.get("jobDeploymentStatus") == deployment and job in (None, status.get("jobStatus"))

        await self.until(there, deployment)

    async def runs(self, **fields: Any) -> None:
        """Bring the job to RUNNING, with an agent that was heard once."""
        await self.submit(**fields)
        await self.is_in("Running", "RUNNING")
        await self.world.beat(self.job, "preflight")
        await self.world.beat(self.job, "running")
        await self.world.reaches(self.job, JobState.RUNNING)

    async def sees(self, words: str) -> None:
        """Until the backend says so of the job."""

        async def said() -> bool:
            return words in (await self.backend.observe(self.name)).message

        await until(said, lambda: f"nobody says {words!r}")

    async def over(self) -> Verdict:
        """The verdict, once everything of the job is gone."""

        while not (job := self.world.job(self.job)).terminal:
            if job.state is JobState.CLEANING:  # which has a limit, and takes real time on a busy machine
                self.world.hand.time += STEP / 10
                await asyncio.sleep(PAUSE)
            else:
                await self.lets_pass(STEP)
        self.it.nothing_left()
        verdict = self.world.job(self.job).verdict
        assert verdict is not None
        return verdict

    async def lets_pass(self, seconds: float) -> JobRecord:
        """Turn the clock and give the service the time to see it."""
        for _ in range(max(1, round(seconds / STEP))):
            self.world.hand.time += STEP
            await asyncio.sleep(PAUSE)
        return self.world.job(self.job)

    async def agent_says(self, code: int) -> None:
        """Its last word over HTTP; then it ends."""
        attempt = self.world.job(self.job).attempt
        await self.world.runner.end(self.job, end_record(self.job, code, attempt))
        job = self.head.jobs[f"{self.job}-a{attempt}"]
        job.exit_code, job.status = code, "FAILED" if code else "SUCCEEDED"


@asynccontextmanager
async def scene(
    it: Kubernetes_, *, bounds: Any = FAST, hand: Hand | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    """A service that was just started; ended without a word to its jobs. settings: of the service's Kubernetes."""
    backend = it.make(bounds, **settings)
    world = World(it.settings.data_dir, backend, hand or Hand())  # type: ignore[arg-type]
    (it.settings.data_dir / "src").mkdir(exist_ok=True)
    (it.settings.data_dir / "src" / "run.sh").write_text("true\n")
    world.runner._tick_seconds = PAUSE
    await world.runner.start()
    try:
        yield Scene(it, world, backend)
    finally:
        await world.runner.close()
        await world.journal.close()
        await backend.close()
        it.backends.remove(backend)
