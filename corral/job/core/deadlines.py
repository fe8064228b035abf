"""The time limits of a job: which one ended first, and what to say about it.

queue: from submit, or from the return into the queue, until admitted. start: from admission until the command runs.
run: of the command. idle: without new output. hang: with a progress counter that does not move; a command that keeps
none has no hang. collecting, cleaning: 120 s each, from the start of the service where that is later.
A moment in the future was written by an earlier service process whose clock was ahead: the span counts as 0, or from
the start of this process where that is known, so that a limit is late at worst and never lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.job.core.classify import message, one_line, place
from corral.job.core.clock import elapsed
from corral.job.core.facts import Facts
from corral.job.core.first_error import place_in
from corral.job.core.machine import DEADLINES, DeadlineKind
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import Heartbeat
from corral.job.protocol.states import FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict

COLLECTING_SECONDS = 120.0
CLEANING_SECONDS = 120.0
HEARING_SECONDS = 10.0  # after a restart of the service: time for agents to be heard before a limit strikes
SILENT_SECONDS = 15.0  # without a heartbeat: worth a word


@dataclass(frozen=True)
class Expired:
    """A limit of `limit` seconds that `waited` seconds have passed. said: one line, with the numbers and the option
    that raises the limit. rank, node: who stands still, of a hang that shows it."""

    kind: DeadlineKind
    limit: float
    waited: float
    said: str
    rank: int | None = None
    node: int | None = None

    @property
    def verdict(self) -> Verdict:
        where = place(self.rank, self.node)
        return Verdict(
            status=Status.TIMEOUT,
            failure_class=FailureClass.TIMEOUT,
            cause=self.kind,
            message=message(Status.TIMEOUT, self.kind, where, self.said),
            failing_rank=self.rank,
            failing_node=self.node,
            evidence=f"{self.waited:.1f} s, limit {self.limit:g} s",
            rule=f"deadline-{self.kind}",
        )


def expired(job: JobRecord, facts: Facts, now: float) -> Expired | None:
    """Of the limits that run in the job's state and have passed, the one that passed first; None when none has."""
    if _just_restarted(job, facts, now):
        return None
    passed = []
    for kind in DEADLINES[job.state]:
        limit, since = limit_of(job, kind), _since(job, facts, kind)
        if limit is None or since is None:
            continue
        if since > now:
            since = now if facts.service_started is None else facts.service_started
        if (waited := elapsed(since, now)) >= limit:
            passed.append((since + limit, kind, limit, waited))
    if not passed:
        return None
    _, kind, limit, waited = min(passed, key=lambda one: one[0])
    return _told(job, facts, now, kind, limit, waited)


def limit_of(job: JobRecord, kind: DeadlineKind) -> float | None:
    """Seconds; None: no limit."""
    timeouts = job.request.timeouts
    limits: dict[DeadlineKind, float | None] = {
        "queue": timeouts.queue,
        "start": timeouts.start,
        "run": timeouts.run,
        "idle": timeouts.idle,
        "hang": timeouts.hang,
        "collecting": COLLECTING_SECONDS,
        "cleaning": CLEANING_SECONDS,
    }
    return limits[kind]


def _just_restarted(job: JobRecord, facts: Facts, now: float) -> bool:
    """Agents ran on while the service was down, and what they did meanwhile is heard within seconds."""
    started = facts.service_started
    held = job.state in (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)
    return held and started is not None and started > job.state_since and elapsed(started, now) < HEARING_SECONDS


def _since(job: JobRecord, facts: Facts, kind: DeadlineKind) -> float | None:
    if kind == "start":
        return job.state_since if job.admitted is None else job.admitted
    running = job.state_since if job.running is None else job.running
    if kind == "run":
        return running
    if kind in ("idle", "hang"):
        heard = facts.heartbeat_of(job)
        if kind == "hang" and (heard is None or heard.progress is None):
            return None
        moved = facts.output_at if kind == "idle" else facts.progress_at
        return max(running, moved or 0.0, facts.service_started or 0.0)
    if kind in ("collecting", "cleaning"):
        return max(job.state_since, facts.service_started or 0.0)
    return job.state_since


def _told(job: JobRecord, facts: Facts, now: float, kind: DeadlineKind, limit: float, waited: float) -> Expired:
    rank = node = None
    numbers = f"{waited:.1f} s (limit {limit:g} s)"
    option = f"raise timeouts.{kind} (--timeout-{kind})"
    if kind == "queue":
        said = f"waited in the queue for {numbers}; {option}, or ask for fewer devices"
    elif kind == "start":
        seen = facts.trouble or (facts.observation.message if facts.observation else "")
        last = f", last seen: {one_line(seen, 200)}" if seen else ""
        said = f"the command did not start within {numbers} of admission; still in {job.state}{last}; {option}"
    elif kind == "run":
        said = f"the command ran for {numbers}; {option}"
    elif kind == "idle":
        said = f"no output for {numbers}{_silence(facts, now)}; {option}"
    elif kind == "hang":
        rank, node, who = _standing_still(facts.heartbeat_of(job), now)
        said = f"no progress counter of any rank moved for {numbers}{who}{_silence(facts, now)}; {option}"
    elif kind == "collecting":
        said = f"the last lines of its logs did not arrive within {numbers}; what is missing lies in its raw log files"
    else:
        last = f" ({one_line(facts.trouble, 200)})" if facts.trouble else ""
        said = (
            f"its nodes and processes were not confirmed gone within {numbers}{last}; the reaper goes on removing them"
        )
    return Expired(kind, limit, waited, said, rank, node)


def _silence(facts: Facts, now: float) -> str:
    if facts.heard_at is None:
        return ", its agent was not heard"
    silent = elapsed(facts.heard_at, now)
    return f", its agent was last heard {silent:.0f} s ago" if silent > SILENT_SECONDS else ""


def _standing_still(heard: Heartbeat | None, now: float) -> tuple[int | None, int | None, str]:
    """(rank, node, clause) of who holds the others up: what the agent suspects, else the one rank whose counter is
    behind all others; in a collective that nobody leaves, no rank stands out."""
    if heard is None:
        return None, None, ""
    if heard.suspects:
        node, rank = place_in(heard.suspects[0])
        return rank, node, f", suspected: {one_line(', '.join(heard.suspects[:4]), 200)}"
    behind = sorted(heard.ranks, key=lambda rank: rank.calls)
    if len(behind) < 2 or behind[0].calls == behind[1].calls:
        return None, None, ""
    last = behind[0]
    doing = f" in {one_line(last.method, 60)}" if last.method else ""
    return last.rank, last.node, f", behind all others{doing} (call {last.calls}, others from {behind[1].calls})"
