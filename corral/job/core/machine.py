"""The states of a job, as data: what may follow what, and which deadlines run in each.

QUEUED goes straight to CANCELLED or TIMEOUT, as there is nothing to collect or remove. From admission on, the way to
an end leads through COLLECTING and CLEANING, whatever the verdict. ACCEPTED and RETRYING are passed, never stayed in:
they exist so that watchers see them. RETRYING still holds the verdict of the attempt that failed, which nothing may
replace, so it leads to QUEUED alone; there the next attempt can be cancelled or time out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from corral.job.protocol.states import TERMINAL, JobState

DeadlineKind = Literal["queue", "start", "run", "idle", "hang", "collecting", "cleaning"]

_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED})
_WAITING = frozenset({JobState.CANCELLED, JobState.TIMEOUT, JobState.FAILED})

ALLOWED: MappingProxyType[JobState, frozenset[JobState]] = MappingProxyType(
    {
        JobState.ACCEPTED: frozenset({JobState.QUEUED}) | _WAITING,
        JobState.QUEUED: frozenset({JobState.PROVISIONING}) | _WAITING,
        JobState.PROVISIONING: frozenset({JobState.PREFLIGHT, JobState.COLLECTING}),
        JobState.PREFLIGHT: frozenset({JobState.RUNNING, JobState.COLLECTING}),
        JobState.RUNNING: frozenset({JobState.COLLECTING}),
        JobState.COLLECTING: frozenset({JobState.CLEANING}),
        JobState.CLEANING: _ENDS | {JobState.RETRYING, JobState.NOT_FOUND},
        JobState.RETRYING: frozenset({JobState.QUEUED}),
        **{state: frozenset[JobState]() for state in TERMINAL},
    }
)

DEADLINES: MappingProxyType[JobState, tuple[DeadlineKind, ...]] = MappingProxyType(
    {
        JobState.ACCEPTED: ("queue",),
        JobState.QUEUED: ("queue",),
        JobState.PROVISIONING: ("start",),
        JobState.PREFLIGHT: ("start",),
        JobState.RUNNING: ("run", "idle", "hang"),
        JobState.COLLECTING: ("collecting",),
        JobState.CLEANING: ("cleaning",),
        JobState.RETRYING: (),
        **dict.fromkeys(TERMINAL, ()),
    }
)

HOLDS_DEVICES = frozenset(
    {JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING, JobState.COLLECTING, JobState.CLEANING}
)


def allowed(at: JobState, to: JobState) -> bool:
    return to in ALLOWED[at]
