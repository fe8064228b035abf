"""The words of the protocol: states of a job, statuses and classes of a verdict."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. What may follow what is data in `core/machine.py`."""

    ACCEPTED = "ACCEPTED"
    QUEUED = "QUEUED"
    PROVISIONING = "PROVISIONING"
    PREFLIGHT = "PREFLIGHT"
    RUNNING = "RUNNING"
    COLLECTING = "COLLECTING"
    CLEANING = "CLEANING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    NOT_FOUND = "NOT_FOUND"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED, JobState.NOT_FOUND})


class Status(StrEnum):
    """What a verdict says. CANCELLED is told as FAILED to clients that do not ask for more than the first protocol."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    NOT_FOUND = "NOT_FOUND"


class FailureClass(StrEnum):
    """Whose failure it is; only infra is retried."""

    USER = "user"
    CONFIG = "config"
    INFRA = "infra"
    TIMEOUT = "timeout"
    CANCEL = "cancel"
