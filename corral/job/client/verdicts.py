"""The verdict of a job as a client reads it, says it and keeps it."""

from __future__ import annotations

import json

from pydantic import ValidationError

from corral.errors import InfraError
from corral.job.client.cursor import Event
from corral.job.client.text import one_line
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.verdict import Verdict


def verdict_of(final: Event) -> Verdict:
    """From a `final` event; `class` in an event is `failure_class` in a verdict, and what is new here is ignored.

    Raises InfraError when it holds no verdict we know: then there is none, rather than a guess.
    """
    named = {name: final[name] for name in Verdict.model_fields if name in final}
    named["failure_class"] = final.get("class") or final.get("failure_class")
    try:
        return Verdict.model_validate({"cause": "", "message": "", **named})
    except ValidationError:
        said = one_line(str(final.get("status")))[:80]
        line = f"verdict not obtainable: the final event says status {said!r}; is this client too old?"
        raise InfraError(line) from None


def verdict_line(verdict: Verdict, job_id: str) -> str:
    """`FAILED (user): rank 5 on node-1: ValueError: ...; exit code 3; job rj-...`.

    The service's message says that by itself; it is put together here for one that does not.
    """
    if verdict.message.startswith(str(verdict.status)):
        return f"{one_line(verdict.message)[:1000]}; job {job_id}"
    if verdict.status is Status.SUCCEEDED:
        return f"SUCCEEDED; job {job_id}"
    kind = verdict.failure_class
    named = verdict.cause if kind in (None, FailureClass.TIMEOUT, FailureClass.CANCEL) else str(kind)
    head = f"{verdict.status} ({named})" if named else str(verdict.status)
    failed = verdict.status is Status.FAILED
    what = one_line((verdict.first_error if failed else None) or verdict.message or verdict.cause)[:500]
    parts = [f"{head}: {_place(verdict) if failed else ''}{what}".rstrip(": ")]
    if failed and verdict.exit_code is not None:
        parts.append(f"exit code {verdict.exit_code}")
    return "; ".join([*parts, f"job {job_id}"])


def as_json(verdict: Verdict | None, job_id: str, url: str, exit_code: int, last_seq: int) -> str:
    """The content of a result file. verdict None: none was obtained. last_seq: of the last event that was seen."""
    result = {
        "job_id": job_id,
        "url": url,
        "exit_code": exit_code,
        "last_seq": last_seq,
        "verdict": None if verdict is None else verdict.model_dump(mode="json"),
    }
    return json.dumps(result, indent=2) + "\n"


def _place(verdict: Verdict) -> str:
    if verdict.failing_rank is None:
        return ""
    node = "" if verdict.failing_node is None else f" on node-{verdict.failing_node}"
    return f"rank {verdict.failing_rank}{node}: "
