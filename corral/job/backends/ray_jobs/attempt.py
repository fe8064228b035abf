"""What the backends that reach their nodes through Ray have in common: how an attempt gets there and how it is seen."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Sequence

from corral import platform
from corral.errors import ConfigError
from corral.job.backends.base import Observation, Placement, Presence
from corral.job.backends.ray_jobs.api import PENDING, RayJob, RayNode, Submission
from corral.job.backends.ray_jobs.errors import fate_of, hearsay, said
from corral.job.backends.ray_jobs.harvest import NONCE, Harvest
from corral.job.protocol.agent import BOARDING as AGENT_BOARDING
from corral.job.protocol.agent import TOKEN as AGENT_TOKEN
from corral.job.protocol.agent import AgentSpec, Boarding
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings

__all__ = [
    "AGENT_BOARDING",
    "AGENT_TOKEN",
    "SERVICE",
    "Harvest",
    "boarding_of",
    "entrypoint",
    "gate",
    "metadata_of",
    "observation_of",
    "resource_of",
    "submission_of",
]

SERVICE, JOB = "corral_service", "corral_job"  # names in a Ray job's metadata
STOP_SECONDS = 10  # that Ray leaves a stopped agent, which needs half of it to end its command and say so
# A variable and its value have at most 128 KiB, and Ray puts the job's variables and metadata into one once more.
LARGEST_BOARDING = 96 << 10


def entrypoint(settings: Settings) -> str:
    """The same for all jobs: what a job asks for is never part of a shell's text."""
    return f"{settings.nodes.python} -m corral.job.agent.join"


def boarding_of(spec: AgentSpec, settings: Settings, secret_env: Collection[str] = ()) -> str:
    """What the agent is started with. secret_env: secrets that the cluster itself gives to the agent.

    Raises ConfigError when it is too long for a variable.
    """
    asked = set(spec.secrets) - set(secret_env)
    boarding = Boarding(
        spec=spec.model_copy(update={"token": "", "secrets": {}, "bundle_path": None}),
        root=settings.nodes.agent_dir,
        join=bool(asked) or spec.bundle is not None,
        secret_env=sorted(secret_env),
    )
    text = boarding.encode()
    if len(text) > LARGEST_BOARDING:
        raise ConfigError(
            f"command and environment of the job come to {len(text)} bytes packed, and a cluster's agent is started "
            f"with at most {LARGEST_BOARDING}; put them into a file of the bundle"
        )
    return text


def metadata_of(spec: AgentSpec, owner: str, placement: Placement) -> dict[str, str]:
    """Of the Ray job, for people and for `list_owned`."""
    return {**placement.about, SERVICE: owner, JOB: spec.job_id}


def submission_of(
    spec: AgentSpec,
    settings: Settings,
    placement: Placement,
    *,
    owner: str,
    secret_env: Collection[str] = (),
    agent_env: bool = True,
) -> Submission:
    """The Ray job of an attempt. owner: id of this service. agent_env: with the agent's token and boarding; False: its
    node has them already.

    Raises ConfigError for a command and environment that are too long.
    """
    # Ray quotes the entrypoint in the log, which it keeps and goes on with when a deleted job's id comes again.
    text = f"{entrypoint(settings)} {NONCE}{secrets.token_hex(8)}"
    env = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    if agent_env:
        env |= {AGENT_TOKEN: spec.token, AGENT_BOARDING: boarding_of(spec, settings, secret_env)}
    return Submission(spec.submission_id, text, env, metadata_of(spec, owner, placement))


def observation_of(job: RayJob | None, output: Sequence[str] | None = ()) -> Observation:
    """What Ray says of a job, as KubeRay would name it. output: see errors.fate_of; it matters for one that is over."""
    if job is None:
        return Observation(Presence.ABSENT)
    if not job.over:
        if job.status == PENDING:
            return Observation(Presence.STARTING, said(job), None, job.status, "Initializing")
        return Observation(Presence.ACTIVE, "", None, job.status, "Running")
    deployment = "Failed" if job.status == "FAILED" else "Complete"
    fate, why = fate_of(job, output), said(job, output)
    return Observation(Presence.ENDED, why, job.exit_code, job.status, deployment, fate, hearsay(fate))


def resource_of(kind: str, nodes: Sequence[RayNode]) -> str:
    """Ray's name of the devices of a kind; for `auto` the first of NPU, GPU and CPU that a node has."""
    names = {"cpu": platform.CPU, "gpu": platform.CUDA, "npu": platform.NPU}
    if kind in names:
        return names[kind].ray_resource
    for facts in (platform.NPU, platform.CUDA):
        if any(node.alive and node.resources.get(facts.ray_resource, 0) >= 1 for node in nodes):
            return facts.ray_resource
    return platform.CPU.ray_resource


def gate(nodes: Sequence[RayNode], resources: Resources, placement: Placement, resource_name: str) -> str | None:
    """Why a job cannot start on these nodes yet: one line with the numbers; None when it can."""
    alive = [node for node in nodes if node.alive]
    wanted, devices = resources.nodes, resources.accelerators_per_node
    if placement.head == "separate":
        busy = next((node for node in alive if node.head and node.resources.get(resource_name, 0) > 0), None)
        if busy is not None:
            has = _count(busy.resources.get(resource_name, 0))
            return (
                f"the head is to be separate, but {_name(busy)}, the cluster's head, has {has} {resource_name}; "
                f"start it with none, or leave layout.head out"
            )
    fit = [node for node in alive if node.resources.get(resource_name, 0) >= devices]
    if len(fit) >= wanted:
        return None
    short = [
        f"{_name(node)} has {_count(node.resources.get(resource_name, 0))}"
        f"{platform.instead(node.resources, resource_name)}"
        for node in alive
        if node not in fit
    ]
    short += [f"{_name(node)} is dead" for node in nodes if not node.alive and node.resources.get(resource_name, 0)]
    alike = [said if count == 1 else f"{said} ({count} times)" for said, count in Counter(short).items()]
    others = "; ".join(alike[:4]) + (f"; and {len(alike) - 4} more" if len(alike) > 4 else "")
    return f"{len(fit)} of {wanted} nodes with {devices} {resource_name}" + (f"; {others}" if others else "")


def _name(node: RayNode) -> str:
    return node.name or node.address or node.node_id[:12]


def _count(number: float) -> str:
    return f"{number:g}"
