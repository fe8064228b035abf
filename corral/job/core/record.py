"""A job as the store keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from corral.job.protocol.states import TERMINAL, JobState
from corral.job.protocol.submit import SubmitRequest
from corral.job.protocol.verdict import Verdict


@dataclass(frozen=True)
class JobRecord:
    """Times are Unix seconds of the service's steady clock.

    version: grows with every transition; a change names the version it was decided on. attempt: from 1.
    state_since: start of the present state. admitted: when this attempt left the queue. running: when its command
    started. verdict: fixed on the way into COLLECTING, or into a terminal state. cancel: cause of a requested cancel.
    lease_until: when the job is cancelled unless a client is heard before; None: never. last_seq: of its newest event.
    owner: name of the token that submitted it. key: idempotency key, unique for an owner.
    """

    job_id: str
    key: str
    owner: str
    request: SubmitRequest
    digest: str
    state: JobState
    version: int
    attempt: int
    created: float
    state_since: float
    admitted: float | None = None
    running: float | None = None
    finished: float | None = None
    verdict: Verdict | None = None
    cancel: str | None = None
    lease_until: float | None = None
    last_seq: int = 0

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def submission_id(self) -> str:
        """Name of this attempt at the backend: a function of job and attempt, DNS-1035, at most 47 characters."""
        return f"{self.job_id}-a{self.attempt}"
