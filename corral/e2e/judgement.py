"""From checks to a status and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.e2e.attendance import Attended
from corral.e2e.result import Check, Status
from corral.job.protocol import states


@dataclass(frozen=True)
class Judged:
    """failure_class: user, config, infra, timeout or cancel; None when passed, and when the job did as it should and an
    expectation was not met."""

    status: Status
    reason: str
    exit_code: int
    failure_class: str | None = None


def judged(checks: Sequence[Check], main: Attended, reference: Attended | None) -> Judged:
    """Passed when every check is ok. Else the exit code is that of the job that did not end as it should, or 1."""
    failed = [check for check in checks if not check.ok]
    if not failed:
        return Judged("PASSED", "", 0)
    for job in (main, reference):
        if job is None or job.verdict is None:
            continue
        if job.lost is not None and job.exit_code == 0:
            return Judged("FAILED", str(job.lost), job.lost.exit_code, "infra")
        if job.exit_code != 0 and (job is reference or failed[0].group == "run"):
            late = job.verdict.status is states.Status.TIMEOUT
            kind = job.verdict.failure_class
            return Judged("TIMEOUT" if late else "FAILED", str(failed[0]), job.exit_code, str(kind) if kind else None)
    return Judged("FAILED", str(failed[0]), 1)
