"""Jobs that Ray calls running for ever although nothing of them is left.

Ray's word alone is not enough for that, nor is its silence: the node that ran the agent has to be dead, or the agent
has to be silent for just as long as Ray.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from corral.errors import InfraError
from corral.job.backends.ray_jobs.api import JobsApi, RayJob, RayNode

NODES_FRESH = 5.0  # seconds that an answer about nodes is good for
NODES_ANSWER = 4.0  # seconds that it may take
SILENCE = 600.0  # seconds in which neither the agent nor Ray was heard, after which both are taken for gone
ASKED = 60.0  # seconds; the service listens to Ray for an agent only while that is not heard otherwise


class Doubts:
    def __init__(self, api: JobsApi) -> None:
        self._api = api
        self._nodes_at, self._nodes = float("-inf"), list[RayNode]()
        self._silent: dict[str, tuple[float, float]] = {}  # since when, and when last

    async def node_lost(self, job: RayJob) -> str | None:
        """One line when the node that the job's process is on is dead, as far as Ray can be asked."""
        if job.node_id is None:
            return None
        if time.monotonic() - self._nodes_at > NODES_FRESH:
            self._nodes_at, self._nodes = time.monotonic(), []
            with suppress(InfraError, TimeoutError):
                async with asyncio.timeout(NODES_ANSWER):
                    self._nodes = await self._api.nodes()
        node = next((node for node in self._nodes if node.node_id == job.node_id), None)
        if node is None or node.alive:
            return None
        return f"Ray's node {node.name or node.node_id[:12]}, which ran the agent, is dead; Ray still says {job.status}"

    def unheard(self, submission_id: str) -> None:
        """Ray did not answer when it was asked because the agent is not heard."""
        now = time.monotonic()
        since, last = self._silent.get(submission_id, (now, now))
        self._silent[submission_id] = (since if now - last < ASKED else now, now)

    def heard(self, submission_id: str) -> None:
        self._silent.pop(submission_id, None)

    def silence(self, submission_id: str) -> str | None:
        """One line when nobody was heard for too long."""
        since, last = self._silent.get(submission_id, (0.0, float("-inf")))
        now = time.monotonic()
        if now - last > ASKED or now - since < SILENCE:
            return None
        return f"neither its agent nor Ray's dashboard at {self._api.address} was heard for {now - since:.0f} s"
