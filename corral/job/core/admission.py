"""Which queued jobs start now. Pure: jobs and capacity in, jobs out.

A job is admitted with all of its devices or not at all. The order is strict: higher priority first, then the older
one; the first that does not fit holds the place for itself, and nothing behind it is started. That may leave devices
idle, but a job of all devices then starts as soon as the running ones end, however many small ones arrive; filling the
gap would need run times that nobody knows. The one exception: a job whose repository is at its quota waits for that
repository's own jobs, so it is passed over and blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from corral.job.backends.base import Capacity
from corral.job.core.machine import HOLDS_DEVICES
from corral.job.core.record import JobRecord
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import Resources, SubmitRequest


def resources_of(request: SubmitRequest, devices_per_node: int = 1) -> Resources:
    """What a request asks for; `devices_per_node`: of the service's profile, for clients that do not say.

    A stored request has its resources spelled out; this gives the same for one that has not been stored yet.
    """
    given = request.resources.model_fields_set if request.resources else set[str]()
    asked = request.resources or Resources(nodes=1, accelerators_per_node=1)
    nodes = asked.nodes if "nodes" in given else request.worker_replicas or 1
    devices = asked.accelerators_per_node if "accelerators_per_node" in given else devices_per_node
    return asked.model_copy(update={"nodes": nodes, "accelerators_per_node": devices})


def admit(
    jobs: Iterable[JobRecord], capacity: Capacity, quota: int | None = None, devices_per_node: int = 1
) -> list[JobRecord]:
    """The jobs in QUEUED that start now, in order. jobs: all that are not terminal; those that hold devices count
    against the capacity, and against `quota`, the devices one repository may hold at a time (None: all).

    A queued job that asked to be cancelled is left out, as is one that fits into no empty cluster: it would block the
    queue for ever, and ends by its queue deadline.
    """
    jobs = list(jobs)

    def devices(job: JobRecord) -> int:
        return resources_of(job.request, devices_per_node).devices

    held: Counter[str] = Counter()
    for job in jobs:
        if job.state in HOLDS_DEVICES:
            held[job.request.repository] += devices(job)
    free = capacity.devices - held.total()
    admitted = []
    for job in sorted((job for job in jobs if _waits(job, capacity, devices_per_node)), key=_order):
        needed = devices(job)
        if quota is not None and held[job.request.repository] + needed > quota:
            continue
        if needed > free:
            break
        admitted.append(job)
        free -= needed
        held[job.request.repository] += needed
    return admitted


def never_fits(
    request: SubmitRequest, capacity: Capacity, quota: int | None = None, devices_per_node: int = 1
) -> str | None:
    """One line that says why a request can never start here; None when it can."""
    asked = resources_of(request, devices_per_node)
    said = f"{asked.nodes} nodes x {asked.accelerators_per_node} devices asked for"
    if asked.nodes > capacity.nodes:
        return f"{said}, but a job here may have {capacity.nodes} nodes; ask for fewer nodes"
    if asked.accelerators_per_node > capacity.devices_per_node:
        return f"{said}, but a node here has {capacity.devices_per_node} devices; ask for fewer devices a node"
    if asked.devices > capacity.devices:
        return f"{said} = {asked.devices}, but there are {capacity.devices} devices here; ask for fewer"
    if quota is not None and asked.devices > quota:
        return f"{said} = {asked.devices}, but {request.repository} may hold {quota} devices at a time; ask for fewer"
    return None


def _order(job: JobRecord) -> tuple[int, float, str]:
    """Age counts from the first submit, so a job that is tried again keeps its place."""
    return -job.request.priority, job.created, job.job_id


def _waits(job: JobRecord, capacity: Capacity, devices_per_node: int) -> bool:
    if job.state is not JobState.QUEUED or job.cancel is not None:
        return False
    return never_fits(job.request, capacity, devices_per_node=devices_per_node) is None
