"""The verdict of a job, and the exit code a client makes of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from corral.job.protocol.states import FailureClass, Status

INFRA_EXIT = 75
CONFIG_EXIT = 78
TIMEOUT_EXIT = 124
CANCELLED_EXIT = 130
UNREACHABLE_EXIT = 69
UNAUTHORISED_EXIT = 77


class Verdict(BaseModel):
    """Fixed once, before logs are collected and nodes removed; later trouble adds warnings and changes nothing here.

    cause: a short slug, such as exit_code, agent_lost, queue, start, run, idle, hang, lease, cancelled_by_user.
    message: one line for people. exit_code: the driver's own, 128 + n when signal n ended it; None when it never ended.
    evidence: the line or fact that decided the class. rule: the name of the matched rule.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status
    cause: str
    message: str
    failure_class: FailureClass | None = None
    exit_code: int | None = None
    failing_rank: int | None = None
    failing_node: int | None = None
    first_error: str | None = None
    evidence: str | None = None
    rule: str | None = None


def client_exit_code(verdict: Verdict, compat: bool = False) -> int:
    """What a client exits with; `compat` gives 0 or 1 as the first helper did.

    0 only for SUCCEEDED. The driver's own code (1-63, or 128 + n) for a failure of the user's code, else 1.
    """
    if verdict.status is Status.SUCCEEDED:
        return 0
    if compat:
        return 1
    if verdict.status is Status.TIMEOUT:
        return TIMEOUT_EXIT
    if verdict.status is Status.CANCELLED:
        return CANCELLED_EXIT
    if verdict.status is Status.NOT_FOUND or verdict.failure_class is FailureClass.INFRA:
        return INFRA_EXIT
    if verdict.failure_class is FailureClass.CONFIG:
        return CONFIG_EXIT
    code = verdict.exit_code or 1
    return code if 1 <= code <= 63 or 128 < code <= 192 else 1
