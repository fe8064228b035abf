"""What agents say on its way into the store."""

from __future__ import annotations

import json

from corral.job.protocol.agent import LogBatch
from corral.job.protocol.preflight import PreflightReport
from corral.job.service.errors import Refusal
from corral.job.store.store import Store

MAX_BODY = 4 << 20
MAX_REPORT = 256 << 10
MAX_LINE = 256 << 10  # bytes in UTF-8; agents split at 64 KiB
MAX_NUMBER = 2**53


def check_batch(batch: LogBatch) -> None:
    """What the model cannot say of a batch. Raises Refusal 422."""
    for chunk in batch.chunks:
        place = f"chunk of {chunk.source} at {chunk.start}"
        if not chunk.start <= chunk.end <= MAX_NUMBER:
            raise Refusal(422, f"{place} ends at {chunk.end}")
        if len(chunk.offsets) != len(chunk.lines):
            raise Refusal(422, f"{place} has {len(chunk.lines)} lines and {len(chunk.offsets)} offsets")
        if any(not chunk.start <= offset <= chunk.end for offset in chunk.offsets):
            raise Refusal(422, f"{place} has an offset outside of its bytes")
        if any(len(line) > MAX_LINE or "\n" in line or "\r" in line for line in chunk.lines):
            raise Refusal(422, f"{place} has a line over {MAX_LINE} bytes or with a line break in it")
        if (chunk.source == "driver") != (chunk.rank is None):
            raise Refusal(422, f"{place}: the driver has no rank, every other source has one")


def keep_report(job_id: str, report: PreflightReport, store: Store) -> None:
    """Append an event for the first report of an attempt; an agent that saw no answer sends it again."""
    kept = store.read(job_id, 0, types=frozenset({"preflight"}), max_bytes=MAX_BODY).data
    if all(json.loads(line)["attempt"] != report.attempt for line in kept.splitlines()):
        store.append(job_id, "preflight", report.event(), report.attempt)
