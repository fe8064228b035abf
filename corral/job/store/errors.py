"""What the store refuses, and why the caller has to look again."""

from __future__ import annotations

from collections.abc import Mapping


class UnknownJob(KeyError):
    """There is no such job, or not any more."""

    def __str__(self) -> str:
        return f"no job {self.args[0]}"


class KeyConflict(Exception):
    """The idempotency key belongs to a job that was asked for with other content, or its id does to another key."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the key belongs to job {job_id}, which was asked for with other content")
        self.job_id = job_id


class Stale(Exception):
    """Someone moved the job first; decide again on the record as it is now."""


class Ended(Exception):
    """The job is over: `final` is its last event."""


class Misfit(Exception):
    """A chunk does not begin where the stored bytes of its source end; nothing of the batch was stored."""

    def __init__(self, watermarks: Mapping[str, int]) -> None:
        super().__init__("a chunk does not begin at the watermark of its source")
        self.watermarks = dict(watermarks)
