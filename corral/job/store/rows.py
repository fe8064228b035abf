"""Jobs as rows and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from corral.job.core.record import JobRecord
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import SubmitRequest
from corral.job.protocol.verdict import Verdict

_SAME = (
    *("job_id", "key", "owner", "digest", "version", "attempt", "created", "state_since"),
    *("admitted", "running", "finished", "cancel", "lease_until", "last_seq"),
)
CHANGEABLE = frozenset({"admitted", "running", "finished", "verdict", "attempt"})


def as_json(value: Any) -> str:
    """ASCII, so that no database refuses a character of it."""
    return json.dumps(value, separators=(",", ":"))


def new_row(
    request: SubmitRequest, digest: str, *, key: str, owner: str, job_id: str, now: float, last_seq: int
) -> dict[str, Any]:
    """A queued job without any output."""
    return {
        "job_id": job_id,
        "key": key,
        "owner": owner,
        "request": as_json(request.model_dump(mode="json")),
        "digest": digest,
        "repository": request.repository,
        "run_id": request.github_run_id,
        "run_attempt": request.github_run_attempt,
        "state": JobState.QUEUED.value,
        "version": 1,
        "attempt": 1,
        "created": now,
        "admitted": None,
        "running": None,
        "finished": None,
        "verdict": None,
        "cancel": None,
        "state_since": now,
        "lease_until": None if request.lease is None else now + request.lease,
        "last_seq": last_seq,
        "segment": 0,
        "segment_end": 0,
        "log_bytes": 0,
        "capped": 0,
    }


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record as columns. Raises TypeError for one that a transition does not change."""
    if unknown := sorted(changes.keys() - CHANGEABLE):
        raise TypeError(f"a transition does not change {', '.join(unknown)}")
    columns = dict(changes)
    if (verdict := columns.get("verdict")) is not None:
        columns["verdict"] = as_json(verdict.model_dump(mode="json"))
    return columns


def record(row: Mapping[Any, Any]) -> JobRecord:
    verdict = row["verdict"]
    return JobRecord(
        request=_request(row["request"]),
        state=JobState(row["state"]),
        verdict=None if verdict is None else Verdict.model_validate(json.loads(verdict)),
        **{name: row[name] for name in _SAME},
    )


@lru_cache(maxsize=4096)
def _request(text: str) -> SubmitRequest:
    """Parsed once for all records of a job: the whole queue is read again and again. Nobody changes a request."""
    return SubmitRequest.model_validate_json(text)


def final_fields(verdict: Verdict) -> dict[str, Any]:
    """What a `final` event says; `class` there is `failure_class` here."""
    fields = verdict.model_dump(mode="json")
    status, kind = fields.pop("status"), fields.pop("failure_class")
    return {"status": status, "class": kind, **fields}
