"""Records of the store as answers."""

from __future__ import annotations

from collections.abc import Sequence

from corral.job.backends.base import Capacity
from corral.job.core.admission import admit, resources_of
from corral.job.core.clock import elapsed
from corral.job.core.machine import HOLDS_DEVICES
from corral.job.core.record import JobRecord
from corral.job.protocol.states import JobState
from corral.job.protocol.views import JobView, QueueView, Waiting
from corral.job.service.settings import Settings


def view(job: JobRecord) -> JobView:
    asked = job.request
    words = [asked.script] if asked.script is not None else asked.command or []
    return JobView(
        job_id=job.job_id,
        state=job.state,
        attempt=job.attempt,
        owner=job.owner,
        repository=asked.repository,
        commit_sha=asked.commit_sha,
        branch=asked.branch,
        github_run_id=asked.github_run_id,
        github_run_attempt=asked.github_run_attempt,
        name_suffix=asked.name_suffix,
        image=asked.image,
        command=[*words, *asked.args],
        env=sorted(asked.env),
        secrets=sorted(asked.secrets),
        labels=asked.labels,
        resources=resources_of(asked),
        timeouts=asked.timeouts,
        priority=asked.priority,
        bundle=asked.bundle,
        created=job.created,
        state_since=job.state_since,
        admitted=job.admitted,
        running=job.running,
        finished=job.finished,
        verdict=job.verdict,
        cancel=job.cancel,
        lease_until=job.lease_until,
        last_seq=job.last_seq,
    )


def in_order(active: Sequence[JobRecord]) -> list[JobRecord]:
    """The queued jobs as they would start on an empty cluster: higher priority first, then the older."""
    queued = [job for job in active if job.state is JobState.QUEUED]
    return sorted(queued, key=lambda job: (-job.request.priority, job.created, job.job_id))


def queue(active: Sequence[JobRecord], capacity: Capacity, settings: Settings, now: float) -> QueueView:
    """`active` are all jobs that are not over, also those that whoever asks may not see: they hold devices too."""
    starting = {job.job_id for job in admit(active, capacity, settings.limits.active_devices_per_repository)}
    waiting, ahead = [], 0
    for job in in_order(active):
        devices = resources_of(job.request).devices
        waiting.append(
            Waiting(
                job_id=job.job_id,
                repository=job.request.repository,
                priority=job.request.priority,
                devices=devices,
                waited=elapsed(job.state_since, now),
                ahead=ahead,
                starts_next=job.job_id in starting,
            )
        )
        ahead += devices
    held = sum(resources_of(job.request).devices for job in active if job.state in HOLDS_DEVICES)
    return QueueView(devices=capacity.devices, held=held, waiting=waiting)
