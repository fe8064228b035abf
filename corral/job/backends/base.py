"""The port between the service and whatever runs jobs. Every backend passes tests/job/backends/contract.py.

All methods are idempotent and keyed by the submission id (a function of job and attempt), so that a service that was
killed between its database and the backend adopts what it started instead of starting it twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from corral.errors import ConfigError
from corral.job.protocol.agent import AgentSpec, EndRecord, Heartbeat
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.submit import Patch, Resources


class Presence(StrEnum):
    """absent: nothing of it exists (any more). starting: nodes are coming up. active: the agent runs or ran and its
    resources are still there. ended: the entrypoint is over, resources may remain."""

    ABSENT = "absent"
    STARTING = "starting"
    ACTIVE = "active"
    ENDED = "ended"


@dataclass(frozen=True)
class Fate:
    """How a submission ended as its backend knows it. It decides only where the agent left no end record. cause: a
    short slug, as in Verdict. failure_class: None for SUCCEEDED alone."""

    status: Status
    cause: str
    failure_class: FailureClass | None = None


@dataclass(frozen=True)
class Observation:
    """What a backend sees of one submission. message: one line, why it ended or is not up yet, "" when all is well.
    rayjob_status and job_deployment_status: as KubeRay names them; backends without them make them up from presence.
    fate: of one that is ended or absent; None: its end says nothing about why. hearsay: it is ended or absent by one
    word alone that has been wrong before, which an agent that is still heard refutes."""

    presence: Presence
    message: str = ""
    exit_code: int | None = None
    rayjob_status: str = ""
    job_deployment_status: str = ""
    fate: Fate | None = None
    hearsay: bool = False


@dataclass(frozen=True)
class Capacity:
    """Devices for all jobs together, and the most nodes and devices of a node that one job may have."""

    devices: int
    nodes: int
    devices_per_node: int

    def check(self, resources: Resources) -> None:
        """Raises ConfigError for a job that never fits, as when the limits were lowered after it was taken."""
        nodes, devices = resources.nodes, resources.accelerators_per_node
        if nodes > self.nodes or devices > self.devices_per_node or resources.devices > self.devices:
            raise ConfigError(
                f"{nodes} nodes of {devices} devices never fit: this service has {self.devices} devices, and a job at "
                f"most {self.nodes} nodes of {self.devices_per_node}"
            )


@dataclass(frozen=True)
class Placement:
    """What the nodes of a job are to be like, besides their number and devices.

    image, profile: "" and None: the backend's own. start, run: seconds until the command has to run, and of the
    command, after which the service has given it up; None: no limit. about: facts for people who look at the cluster
    (repository, commit, run), never secrets. secrets: names of what the job may read.
    """

    image: str = ""
    profile: str | None = None
    head: Literal["shared", "separate"] = "shared"
    patches: tuple[Patch, ...] = ()
    start: float | None = None
    run: float | None = None
    priority: int = 0
    about: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


ANY = Placement()


class Backend(Protocol):
    """name: for logs and metrics. capacity: fixed while the service runs. remote: agents do not write into
    attempt_dir, which then is a folder of the service for what `fetch` brings and what agents send."""

    name: str
    remote: bool
    capacity: Capacity

    def refusal(self, resources: Resources, placement: Placement) -> str | None:
        """One line that says why such a job can never run here; None when it can. Asked before a job is taken."""

    def manifest(self, submission_id: str, resources: Resources, placement: Placement) -> str | None:
        """What would be created, as YAML, for people; None when the backend creates nothing of that kind."""

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
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
        """Submission ids of everything that exists and was started from this service's data folder."""

    async def end_record(self, submission_id: str) -> EndRecord | None:
        """The whole end record on disk, None when there is none or it is not whole."""

    async def fetch(self, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        """Bring what the cluster holds of an agent's output, beyond these byte offsets of its sources, into
        attempt_dir; the newest heartbeat found there, None when there is none since the last call. Asked only of remote
        backends, when the agent itself is not heard and before its submission is destroyed.

        Raises InfraError when the cluster does not answer.
        """

    def attempt_dir(self, submission_id: str) -> Path | None:
        """Where raw logs lie that the service can read itself; None when the backend has no such place."""
