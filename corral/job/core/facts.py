"""What is known about a job besides its record: the input of every decision."""

from __future__ import annotations

from dataclasses import dataclass

from corral.job.backends.base import Observation
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord, Heartbeat


@dataclass(frozen=True)
class Facts:
    """Of the present attempt; times are those of the service's clock, None: not yet.

    observation: the backend's latest answer. refused: why the backend can never start the job (its ConfigError).
    heard, heard_at: the agent's latest heartbeat. output_at: when this process last saw the output grow; progress_at:
    the same of the progress counter. end: the end record. ended_seen_at: when the backend was first seen to say ended
    or absent after it had been asked to start the job. logs_complete: all that the command wrote is stored. absent:
    the backend said that nothing of the attempt is left. trouble: what the backend could not do or did not answer when
    it was last asked. service_started: when this service process began to look.
    """

    observation: Observation | None = None
    heard: Heartbeat | None = None
    heard_at: float | None = None
    output_at: float | None = None
    progress_at: float | None = None
    end: EndRecord | None = None
    ended_seen_at: float | None = None
    logs_complete: bool = False
    absent: bool = False
    refused: str | None = None
    trouble: str = ""
    service_started: float | None = None

    def heartbeat_of(self, job: JobRecord) -> Heartbeat | None:
        """The heartbeat, unless it belongs to an earlier attempt."""
        return self.heard if self.heard is not None and self.heard.attempt == job.attempt else None

    def end_of(self, job: JobRecord) -> EndRecord | None:
        """The end record, unless it is not whole or of another job or attempt."""
        end = self.end
        if end is None or (end.job_id, end.attempt) != (job.job_id, job.attempt) or not end.is_whole():
            return None
        return end
