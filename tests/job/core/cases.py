"""Jobs and records for the tests of the core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import SubmitRequest

START = 1_000_000.0


def request(**fields: Any) -> SubmitRequest:
    return SubmitRequest.model_validate({"script": "/src/train.sh"} | fields)


def job(state: JobState = JobState.QUEUED, *, asked: dict[str, Any] | None = None, **fields: Any) -> JobRecord:
    wanted = request(**(asked or {}))
    record = JobRecord("rj-0123456789ab", "key:a", "me", wanted, wanted.digest(), state, 1, 1, START, START)
    return replace(record, **fields)


def end(exit_code: int | None, first_error: str | None = None, attempt: int = 1, **fields: Any) -> EndRecord:
    record = {"job_id": "rj-0123456789ab", "attempt": attempt, "exit_code": exit_code, "first_error": first_error}
    return EndRecord.model_validate(record | {"started": START, "ended": START + 12.0} | fields).sealed()


def heartbeat(phase: str = "running", attempt: int = 1, **fields: Any) -> Heartbeat:
    return Heartbeat.model_validate({"attempt": attempt, "phase": phase} | fields)
