"""What happens to a job next: a pure function of its record, the facts and the time.

Before the verdict is fixed, in this order:

1. A whole end record of this attempt. It is the only word on how the command ended, so it wins over everything that
   is known at the same time: a cancel, a passed deadline, a backend that says otherwise.
2. The backend refused the job for ever: class config.
3. A cancel that was asked for, then the end of the client's lease: CANCELLED.
4. A passed deadline, of several the first one: TIMEOUT with the kind as its cause.
5. The backend has said "ended" or "absent" for 5 s and there is no end record: FAILED, infra, agent_lost. The end of a
   stream, a heartbeat that stays away, a backend that does not answer: none of them decides anything. Where the
   backend has it from hearsay, an agent that was heard in the last 15 s refutes it.
6. Otherwise the job moves on as its agent tells.

The verdict is fixed on the way into COLLECTING (a job that waits has nothing to collect: into its terminal state) and
nothing changes it after that; what goes wrong later is a warning. COLLECTING ends when all logs are stored or after
120 s, CLEANING when the backend says that nothing is left or after 120 s, and then the job is over, or tried again:
only a failure of class infra, with attempts left, that nobody has cancelled meanwhile, and whose nodes are confirmed
gone, as a second attempt beside a living first one would write into the same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.job.core.classify import cancelled, classify, lost, refused
from corral.job.core.clock import elapsed
from corral.job.core.deadlines import SILENT_SECONDS, expired
from corral.job.core.facts import Facts
from corral.job.core.record import JobRecord
from corral.job.protocol.states import TERMINAL, FailureClass, JobState
from corral.job.protocol.verdict import Verdict

__all__ = ["LOST_GRACE", "Decision", "Facts", "decide"]

LOST_GRACE = 5.0  # seconds an end record may come after the backend said that it is over


@dataclass(frozen=True)
class Decision:
    """The next state. verdict: set exactly when it gets fixed now. warning: to be told as an event of its own."""

    to: JobState
    message: str
    verdict: Verdict | None = None
    warning: str | None = None

    def changes(self, job: JobRecord, now: float) -> dict[str, Any]:
        """Fields of the record that change together with the state; a new attempt starts without the old one's."""
        changes: dict[str, Any] = {}
        if self.verdict is not None:
            changes["verdict"] = self.verdict
        if self.to is JobState.PROVISIONING:
            changes["admitted"] = now
        elif self.to is JobState.RUNNING:
            changes["running"] = now
        elif self.to in TERMINAL:
            changes["finished"] = now
        elif job.state is JobState.RETRYING:
            changes |= {"attempt": job.attempt + 1, "verdict": None, "admitted": None, "running": None}
        return changes


def decide(job: JobRecord, facts: Facts, now: float) -> Decision | None:
    """The next step, None when there is none; to be asked again until then. Admission is not decided here."""
    if job.terminal:
        return None
    if job.state is JobState.COLLECTING:
        return _collecting(job, facts, now)
    if job.state is JobState.CLEANING:
        return _cleaning(job, facts, now)
    if job.state in (JobState.ACCEPTED, JobState.QUEUED, JobState.RETRYING):
        return _waiting(job, facts, now)
    if verdict := _verdict(job, facts, now):
        return Decision(JobState.COLLECTING, verdict.message, verdict)
    return _onward(job, facts)


def _verdict(job: JobRecord, facts: Facts, now: float) -> Verdict | None:
    if end := facts.end_of(job):
        return classify(end)
    if verdict := _unwanted(job, facts, now):
        return verdict
    if facts.ended_seen_at is None or _lives(job, facts, now):
        return None
    silent = elapsed(facts.ended_seen_at, now)
    return lost(facts.observation, silent) if silent >= LOST_GRACE else None


def _lives(job: JobRecord, facts: Facts, now: float) -> bool:
    """Whether the agent is heard, of a job that the backend calls over from hearsay."""
    if facts.observation is None or not facts.observation.hearsay or facts.heartbeat_of(job) is None:
        return False
    return facts.heard_at is not None and elapsed(facts.heard_at, now) < SILENT_SECONDS


def _unwanted(job: JobRecord, facts: Facts, now: float) -> Verdict | None:
    """Why the job is to end, or not to start, from outside of it."""
    if facts.refused is not None:
        return refused(facts.refused)
    if job.cancel is not None:
        return cancelled(job.cancel)
    if _lease_ended(job, facts, now):
        return cancelled("lease", f"no client was heard for {job.request.lease:g} s, the job's lease")
    passed = expired(job, facts, now)
    return passed.verdict if passed else None


def _waiting(job: JobRecord, facts: Facts, now: float) -> Decision | None:
    if job.state is JobState.RETRYING:
        attempts = job.request.retry.infra + 1
        return Decision(JobState.QUEUED, f"attempt {job.attempt + 1} of {attempts} waits for its devices")
    if verdict := _unwanted(job, facts, now):
        return Decision(JobState(verdict.status), verdict.message, verdict)
    if job.state is JobState.ACCEPTED:
        return Decision(JobState.QUEUED, "waits for its devices")
    return None


def _onward(job: JobRecord, facts: Facts) -> Decision | None:
    heard = facts.heartbeat_of(job)
    if heard is None:
        return None
    if job.state is JobState.PROVISIONING:
        return Decision(JobState.PREFLIGHT, "the agent runs and checks")
    if job.state is JobState.PREFLIGHT and heard.phase != "preflight":
        return Decision(JobState.RUNNING, "the command runs")
    return None


def _collecting(job: JobRecord, facts: Facts, now: float) -> Decision | None:
    if facts.logs_complete:
        return Decision(JobState.CLEANING, "all logs are stored")
    if passed := expired(job, facts, now):
        return Decision(JobState.CLEANING, "logs are incomplete", warning=passed.said)
    return None


def _cleaning(job: JobRecord, facts: Facts, now: float) -> Decision | None:
    assert job.verdict is not None, f"{job.job_id} is in CLEANING without a verdict"
    passed = None if facts.absent else expired(job, facts, now)
    if not facts.absent and passed is None:
        return None
    warning = passed.said if passed else None
    if _tried_again(job, facts, now):
        if facts.absent:
            return Decision(
                JobState.RETRYING, f"attempt {job.attempt} failed and is tried again: {job.verdict.message}"
            )
        warning = f"{warning}; not tried again, as the first attempt may still run"
    return Decision(JobState(job.verdict.status), job.verdict.message, warning=warning)


def _tried_again(job: JobRecord, facts: Facts, now: float) -> bool:
    assert job.verdict is not None
    wanted = job.cancel is None and not _lease_ended(job, facts, now)
    return wanted and job.verdict.failure_class is FailureClass.INFRA and job.attempt <= job.request.retry.infra


def _lease_ended(job: JobRecord, facts: Facts, now: float) -> bool:
    """While the service was down no client could renew, so after its start a lease runs at least once in full; and at
    most so, where the clock of the process that wrote it was ahead."""
    if job.lease_until is None or job.request.lease is None:
        return False
    until, lease, started = job.lease_until, job.request.lease, facts.service_started
    if started is not None and started > job.created:
        until = max(until, started + lease)
    if started is not None and until > now + lease:
        until = started + lease
    return now >= until
