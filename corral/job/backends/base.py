"""The port between the service and whatever runs jobs. Every backend passes tests/job/backends/contract.py.

All methods are idempotent and keyed by the submission id (a function of job and attempt), so that a service that was
killed between its database and the backend adopts what it started instead of starting it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from corral.job.protocol.agent import AgentSpec, EndRecord
from corral.job.protocol.submit import Resources


class Presence(StrEnum):
    """absent: nothing of it exists (any more). starting: nodes are coming up. active: the agent runs or ran and its
    resources are still there. ended: the entrypoint is over, resources may remain."""

    ABSENT = "absent"
    STARTING = "starting"
    ACTIVE = "active"
    ENDED = "ended"


@dataclass(frozen=True)
class Observation:
    """What a backend sees of one submission. message: one line, why it ended or is not up yet, "" when all is well.
    rayjob_status and job_deployment_status: as KubeRay names them; backends without them make them up from presence."""

    presence: Presence
    message: str = ""
    exit_code: int | None = None
    rayjob_status: str = ""
    job_deployment_status: str = ""


@dataclass(frozen=True)
class Capacity:
    """Devices for all jobs together, and the most nodes and devices of a node that one job may have."""

    devices: int
    nodes: int
    devices_per_node: int


class Backend(Protocol):
    """name: for logs and metrics. capacity: fixed while the service runs."""

    name: str
    capacity: Capacity

    async def provision(self, spec: AgentSpec, resources: Resources) -> None:
        """Start nodes and the agent. Returns once that is under way; a second call does nothing.

        Raises ConfigError when it can never be started, InfraError when it cannot now.
        """

    async def observe(self, submission_id: str) -> Observation:
        """What is there now. Raises InfraError when the backend does not answer, which says nothing about the job."""

    async def stop(self, submission_id: str, grace: float) -> None:
        """Ask the command to end: SIGTERM, after `grace` seconds SIGKILL. Returns at once; unknown ids are ignored."""

    async def destroy(self, submission_id: str) -> None:
        """Remove everything of the submission; returns when observe would say absent. Raises InfraError otherwise."""

    async def list_owned(self) -> list[str]:
        """Submission ids of everything that exists and was started by this service's data folder."""

    async def end_record(self, submission_id: str) -> EndRecord | None:
        """The whole end record on disk, None when there is none or it is not whole."""

    def attempt_dir(self, submission_id: str) -> Path | None:
        """Where raw logs lie that the service can read itself; None when the backend has no such place."""
