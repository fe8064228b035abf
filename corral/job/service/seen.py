"""What this service process has seen of one attempt. Nothing of it is stored: after a restart it is seen anew."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from corral.job.backends.base import Observation, Presence
from corral.job.core.facts import Facts
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.states import JobState

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between tries of what failed
TELL_AFTER = 5.0  # seconds of waiting for nodes until it is said why, and between two such lines


@dataclass
class Seen:
    """Times are those of the service's clock.

    since: when this process began to look at the attempt. provisioned: the backend took it over. refused: why it never
    will. trouble: what its latest failure said, None after a success. not_before: no try before that time.
    stopped: the command was told to end. drained: what the agent did not ship was stored by the service.
    absent: everything of it is gone, and all that it wrote is stored. work: what is being done for it, worked_for: in
    which state of the job. listened_at: when the cluster was last asked for what its agent says there. told, told_at:
    what its user was last told that it waits for, and when. unanswered: why the backend did not say what it sees when
    it was last asked.
    """

    attempt: int
    since: float
    provisioned: bool = False
    refused: str | None = None
    trouble: str | None = None
    not_before: float = 0.0
    stopped: bool = False
    drained: bool = False
    absent: bool = False
    work: asyncio.Task[None] | None = None
    worked_for: JobState | None = None
    listened_at: float = 0.0
    unanswered: str | None = None
    told: str = ""
    told_at: float = 0.0
    observation: Observation | None = None
    ended_seen_at: float | None = None
    end: EndRecord | None = None
    heard: Heartbeat | None = None
    heard_at: float | None = None
    output_at: float = field(init=False)
    progress_at: float = field(init=False)
    _delay: float = FIRST_DELAY

    def __post_init__(self) -> None:
        self.output_at = self.progress_at = self.since

    def hear(self, heartbeat: Heartbeat, now: float) -> bool:
        """Take in a heartbeat; whether it tells of another phase than the one before."""
        before = self.heard
        if before is None or heartbeat.output_bytes > before.output_bytes:
            self.output_at = now
        if before is None or (heartbeat.progress or 0) > (before.progress or 0):
            self.progress_at = now
        self.heard, self.heard_at = heartbeat, now
        return before is None or before.phase != heartbeat.phase

    def observe(self, observation: Observation, now: float) -> None:
        self.observation, self.unanswered = observation, None
        if observation.presence not in (Presence.ENDED, Presence.ABSENT):
            self.ended_seen_at = None
        elif self.ended_seen_at is None:
            self.ended_seen_at = now

    @property
    def agent_gone(self) -> bool:
        """By the backend's word, unless that is hearsay and the agent was heard since."""
        if self.observation is None or self.ended_seen_at is None:
            return False
        return not (self.observation.hearsay and (self.heard_at or 0.0) > self.ended_seen_at)

    def failed(self, message: str, now: float) -> None:
        """A try failed: the next one comes later than the one before did."""
        self.trouble = message
        self.not_before = now + self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY)

    def succeeded(self) -> None:
        self.trouble, self.not_before, self._delay = None, 0.0, FIRST_DELAY

    def news(self, waits_for: str, waiting_since: float, now: float) -> bool:
        """Whether to tell its user what it waits for; not what was said already, nor what passes in a moment."""
        if not waits_for or waits_for == self.told or now - max(waiting_since, self.told_at) < TELL_AFTER:
            return False
        self.told, self.told_at = waits_for, now
        return True

    def facts(self, started: float, logs_complete: bool) -> Facts:
        """started: when the service process began to look at jobs."""
        return Facts(
            observation=self.observation,
            heard=self.heard,
            heard_at=self.heard_at,
            output_at=self.output_at,
            progress_at=self.progress_at,
            end=self.end,
            ended_seen_at=self.ended_seen_at,
            logs_complete=logs_complete,
            absent=self.absent,
            refused=self.refused,
            trouble=self.unanswered or self.trouble or "",
            service_started=started,
        )
