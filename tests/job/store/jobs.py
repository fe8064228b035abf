"""Jobs, lines and what a reader sees, for tests of the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from corral.job.core.record import JobRecord
from corral.job.protocol.agent import DRIVER, LogBatch, LogChunk
from corral.job.protocol.events import ALL_TYPES
from corral.job.protocol.states import JobState, Status
from corral.job.protocol.submit import SubmitRequest
from corral.job.protocol.verdict import Verdict
from corral.job.store.store import Store

JOB = "rj-000000000001"
TO_RUNNING = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)


def request(**fields: Any) -> SubmitRequest:
    return SubmitRequest.model_validate({"script": "run.sh", "bundle": "0" * 64} | fields)


def new_job(store: Store, job_id: str = JOB, **fields: Any) -> JobRecord:
    job, created = store.create(request(**fields), key=f"key of {job_id}", owner="ann", job_id=job_id)
    assert created
    return job


def run(store: Store, job: JobRecord) -> JobRecord:
    for state in TO_RUNNING:
        job = store.transition(job, state, message=f"to {state}")
    return job


def finish(store: Store, job: JobRecord, status: Status = Status.SUCCEEDED) -> JobRecord:
    """Along the states to a verdict."""
    verdict = Verdict(status=status, cause="exit_code", message="over")
    if job.state is JobState.QUEUED:
        job = run(store, job)
    job = store.transition(job, JobState.COLLECTING, message="ended", verdict=verdict)
    job = store.transition(job, JobState.CLEANING, message="all logs are stored")
    return store.transition(job, JobState(status.value), message="over")


def place_of(source: str) -> tuple[int | None, int | None]:
    """(node, rank) of a source."""
    if source == DRIVER:
        return None, None
    node, rank = source.split("/")
    return int(node.removeprefix("node-")), int(rank.removeprefix("rank-"))


def chunk(source: str, start: int, lines: Sequence[str]) -> LogChunk:
    """Lines as they would lie in a raw file from byte `start` on."""
    offsets, end = [], start
    for line in lines:
        offsets.append(end)
        end += len(line.encode("utf-8", "replace")) + 1
    node, rank = place_of(source)
    return LogChunk(source=source, node=node, rank=rank, start=start, end=end, lines=list(lines), offsets=offsets)


def batch(*chunks: LogChunk, attempt: int = 1) -> LogBatch:
    return LogBatch(attempt=attempt, chunks=list(chunks))


def read_all(
    store: Store,
    job_id: str = JOB,
    after_seq: int = 0,
    types: frozenset[str] = ALL_TYPES,
    ranks: frozenset[int] | None = None,
    max_bytes: int = 256 << 10,
) -> list[dict[str, Any]]:
    """All events, page by page."""
    data, cursor = b"", after_seq
    while True:
        page = store.read(job_id, cursor, types=types, ranks=ranks, max_bytes=max_bytes)
        assert len(page.data) <= max_bytes or page.data.count(b"\n") == 1
        data += page.data
        moved, cursor = page.next_seq > cursor, page.next_seq
        if not moved or page.done:
            assert data == b"" or data.endswith(b"}\n")
            return [json.loads(line) for line in data.split(b"\n")[:-1]]


def lines_of(events: Sequence[dict[str, Any]], source: str) -> list[str]:
    return [event["line"] for event in events if event["type"] == "log" and event["source"] == source]


def is_gap_free(events: Sequence[dict[str, Any]]) -> bool:
    return [event["seq"] for event in events] == list(range(1, len(events) + 1))
