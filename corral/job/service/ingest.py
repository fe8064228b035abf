"""Batches of log lines on their way into the store."""

from __future__ import annotations

from corral.job.protocol.agent import LogBatch
from corral.job.service.errors import Refusal

MAX_BODY = 4 << 20
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
