"""The way of one submission from a RayJob to a job that Ray runs, in steps that may be repeated after a crash anywhere.

1. The operator makes the cluster, and its dashboard answers (deployment status Waiting).
2. The gate: as many nodes with the right devices as the job needs.
3. The head that gets the job is written down on the RayJob. A later head is never given it: it knows nothing of the
   first one's processes, and the job would run twice.
4. The job is submitted under an id that is a function of job and attempt: one that Ray knows already is that job.
5. The id is written into the RayJob, from where the operator follows it.

In the other submission modes the operator does 4 and 5 itself without 2, and only 3 is left, once the job runs.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from corral.errors import ConfigError, InfraError
from corral.job.backends.base import Placement, Presence
from corral.job.backends.kuberay.client import RAYJOBS, Object
from corral.job.backends.kuberay.cluster import Cluster
from corral.job.backends.kuberay.dashboard import Dashboards
from corral.job.backends.kuberay.errors import Conflict
from corral.job.backends.kuberay.pod_states import head_of, uid_of
from corral.job.backends.kuberay.status import HEAD, INTERACTIVE, head_given, judge, mode_of, submitted, text
from corral.job.backends.ray_jobs.api import Submission
from corral.job.backends.ray_jobs.attempt import gate
from corral.job.protocol.submit import Resources

LOOK = 1.0  # seconds between looks when nothing changes
LONGEST = 8.0  # of these between tries of a step that fails


@dataclass(frozen=True)
class Wanted:
    """What is to run, and what the nodes have to be like. devices: Ray's name of them."""

    submission: Submission
    resources: Resources
    placement: Placement
    devices: str


class Way:
    """said: one line, what it waits for, "" when that is the operator. wanted: known from the moment provision was
    called in this process; until then only what Ray has already is written down. refused: why it can never go on."""

    def __init__(
        self,
        submission_id: str,
        cluster: Cluster,
        dashboards: Dashboards,
        look: float = LOOK,
    ) -> None:
        self.wanted: Wanted | None = None
        self.said = ""
        self.refused = ""
        self._name, self._cluster, self._dashboards = submission_id, cluster, dashboards
        self._look = look
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Go on in the background, in the loop that runs; a second call does nothing."""
        if not self._closed and not self.refused and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name=f"way of {self._name}")

    async def close(self) -> None:
        """Nothing is submitted from here on."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = self._look
        while True:
            before = self._cluster.rayjobs.get(self._name)
            try:
                if await self.step():
                    self.said = ""
                    return
                pause = self._look
            except ConfigError as error:
                self.refused = self.said = str(error)
                return
            except Conflict:
                pause = self._look  # somebody changed it a moment ago: look again
            except InfraError as error:
                self.said = str(error)
                pause = min(LONGEST * self._look, 2 * pause)
            await self._changed(before, pause)

    async def _changed(self, before: Object | None, seconds: float) -> None:
        """Until its own RayJob is not as before, or that long: of hundreds, others change all the time."""
        rayjobs = self._cluster.rayjobs
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while rayjobs.get(self._name) is before:
                    rayjobs.changed.clear()
                    await rayjobs.changed.wait()

    async def step(self) -> bool:
        """One look and what follows from it; whether there is nothing left to do.

        Raises InfraError for what may go better next time, ConfigError for what never will.
        """
        rayjob = await self._cluster.rayjob(self._name)
        if rayjob is None or rayjob["metadata"].get("deletionTimestamp"):
            return True
        seen = judge(rayjob)
        if seen is not None and seen.presence is Presence.ENDED:
            return True
        if mode_of(rayjob) != INTERACTIVE:
            return await self._note_head(rayjob)
        if submitted(rayjob):
            return True
        return await self._submit(rayjob)

    async def _submit(self, rayjob: Object) -> bool:
        api = self._dashboards.of(self._name, rayjob)
        if text(rayjob.get("status") or {}, "jobDeploymentStatus") != "Waiting" or api is None:
            self.said = ""
            return False
        head, given = self._head(rayjob), head_given(rayjob)
        if not head:
            self.said = "the head pod is not there yet"
            return False
        if given and given != head:
            return True
        if not (given and await api.get(self._name) is not None):
            if self.wanted is None:
                self.said = "the service was started anew, and has not come to this job yet"
                return False
            nodes, wanted = await api.nodes(), self.wanted
            self.said = gate(nodes, wanted.resources, wanted.placement, wanted.devices) or ""
            if self.said:
                return False
            if not given:
                await self._write_head(rayjob, head)
            await api.submit(wanted.submission)
        await self._cluster.client.patch(RAYJOBS, self._name, {"spec": {"jobId": self._name}})
        return True

    async def _note_head(self, rayjob: Object) -> bool:
        if head_given(rayjob):
            return True
        head = self._head(rayjob)
        if not submitted(rayjob) or not head or text(rayjob.get("status") or {}, "jobStatus") != "RUNNING":
            return False
        await self._write_head(rayjob, head)
        return True

    async def _write_head(self, rayjob: Object, head: str) -> None:
        """Only on the object as it was read: nobody has written another one meanwhile, nor suspended the job."""
        about = {"resourceVersion": rayjob["metadata"]["resourceVersion"], "annotations": {HEAD: head}}
        await self._cluster.client.patch(RAYJOBS, self._name, {"metadata": about})

    def _head(self, rayjob: Object) -> str:
        pods = self._cluster.pods_of(self._name, text(rayjob.get("status") or {}, "rayClusterName"))
        head = head_of(pods or [])
        return uid_of(head) if head is not None else ""
