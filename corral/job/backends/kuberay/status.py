"""What a RayJob object says about a submission: a table over its two status fields, without any I/O.

The deployment's status is looked at first, then the job's: the job's is a copy that the operator makes of what Ray
says, and it stays what it was when Ray cannot be asked any more. So where it matters the Jobs API is asked itself.
Everything here is level-triggered: an object read twice, late, or after others were missed says the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from corral.job.backends.base import Fate, Observation, Presence
from corral.job.backends.ray_jobs.api import RayJob
from corral.job.backends.ray_jobs.errors import (
    AGENT_LOST,
    HEAD_LOST,
    NOT_FOUND,
    NOT_INSTALLED,
    STOPPED,
    SUCCEEDED,
    USER,
    fate_of,
    hearsay,
    said,
)
from corral.job.protocol.states import FailureClass, Status

RayJobObject = Mapping[str, Any]

INTERACTIVE = "InteractiveMode"
# Annotations of ours on a RayJob. HEAD: which head the job was given to, written down before that is done.
HEAD = "corral.dev/head"

_INFRA, _CONFIG = FailureClass.INFRA, FailureClass.CONFIG
_START = Fate(Status.TIMEOUT, "start", FailureClass.TIMEOUT)
_RUN = Fate(Status.TIMEOUT, "run", FailureClass.TIMEOUT)

# The operator calls it AppFailed when Ray knows nothing of the job any more, or when the head pod is gone.
_NOT_THE_APP = re.compile(
    r"(?i)head ?pod|head node|submitter.{0,40}(?:finished|completed)|"
    r"job\b.{0,80}\b(?:not found|does not exist|not exist)"
)
_EXIT_CODE = re.compile(r"\bfailed with exit code (-?\d{1,4})\b")


class Answer(StrEnum):
    """Of the Jobs API, asked about the submission. silent: it gave none. unknown: it has no such job."""

    UNASKED = "unasked"
    SILENT = "silent"
    UNKNOWN = "unknown"
    KNOWN = "known"


@dataclass(frozen=True)
class Heard:
    """output: the last lines of the job's output, of one that is over; None: it is not known."""

    answer: Answer
    job: RayJob | None = None
    output: Sequence[str] | None = None


UNASKED, SILENT, UNKNOWN = Heard(Answer.UNASKED), Heard(Answer.SILENT), Heard(Answer.UNKNOWN)


def known(job: RayJob, output: Sequence[str] | None = None) -> Heard:
    return Heard(Answer.KNOWN, job, output)


@dataclass(frozen=True)
class Row:
    """Fits when all that is given fits. job: values of jobStatus."""

    deployment: str
    fate: Fate
    reasons: tuple[str, ...] | None = None
    job: tuple[str, ...] | None = None

    def fits(self, deployment: str, reason: str, job: str) -> bool:
        return (
            self.deployment == deployment
            and (self.reasons is None or reason in self.reasons)
            and (self.job is None or job in self.job)
        )


# What is decided without asking Ray. AppFailed and SubmissionFailed are not here, nor is Complete where the operator
# has no end from Ray: its submitter ended well, which is not the job. See _failed.
ENDS: tuple[Row, ...] = (
    Row("ValidationFailed", Fate(Status.FAILED, "validation", _CONFIG)),
    Row("Failed", _START, ("PreRunningDeadlineExceeded",)),
    Row("Failed", _START, ("DeadlineExceeded",), ("", "PENDING")),
    Row("Failed", _RUN, ("DeadlineExceeded",)),
    Row("Failed", Fate(Status.FAILED, "validation", _CONFIG), ("ValidationFailed",)),
    Row("Failed", Fate(Status.FAILED, "no_status", _INFRA), ("JobDeploymentStatusTransitionGracePeriodExceeded",)),
    Row("Failed", Fate(Status.FAILED, "status_check", _INFRA), ("JobStatusCheckTimeoutExceeded",)),
    Row("Complete", SUCCEEDED, job=("SUCCEEDED",)),
    Row("Complete", STOPPED, job=("STOPPED",)),
    Row("Retrying", Fate(Status.FAILED, "operator_retry", _INFRA)),
)


def judge(rayjob: RayJobObject, heard: Heard = UNASKED) -> Observation | None:
    """What the object says; None: it depends on the Jobs API, which has to be asked first."""
    status = rayjob.get("status") or {}
    deployment, job = text(status, "jobDeploymentStatus"), text(status, "jobStatus")
    reason = text(status, "reason")
    if row := next((row for row in ENDS if row.fits(deployment, reason, job)), None):
        code = 0 if row.fate is SUCCEEDED else None
        return _over(rayjob, row.fate, code)
    if deployment in ("Failed", "Complete"):
        return _failed(rayjob, reason, job, heard)
    if deployment in ("Suspending", "Suspended") and was_given(rayjob):
        return _over(rayjob, Fate(Status.FAILED, "preempted", _INFRA))
    if rayjob.get("metadata", {}).get("deletionTimestamp"):
        return _over(rayjob, NOT_FOUND, why=f"{name_of(rayjob)} is being deleted, not by Corral")
    if not submitted(rayjob) and heard.job is None:
        if head_given(rayjob) and heard is UNASKED:
            return None  # it may have been submitted just before whoever did that was killed
        return _observed(rayjob, Presence.STARTING, _waiting(rayjob, deployment))
    return None if heard is UNASKED else _running(rayjob, job, heard)


def gone(submission_id: str) -> Observation:
    """Of a RayJob that was there and is not any more."""
    return Observation(Presence.ABSENT, f"RayJob {submission_id} was deleted, not by Corral", fate=NOT_FOUND)


def lost_head(rayjob: RayJobObject, why: str) -> Observation:
    """The job was given to a head that is not there any more. Another head knows nothing of it, and is not given it
    again: the first one's processes may live on."""
    return _over(rayjob, HEAD_LOST, why=why)


def submitted(rayjob: RayJobObject) -> bool:
    """Whether Ray was told of the job, or the operator is to tell it, as far as the object says."""
    deployment = text(rayjob.get("status") or {}, "jobDeploymentStatus")
    if mode_of(rayjob) == INTERACTIVE:
        return bool(rayjob.get("spec", {}).get("jobId"))
    return deployment == "Running"


def was_given(rayjob: RayJobObject) -> bool:
    """Whether a head was, or may have been, given the job."""
    status = rayjob.get("status") or {}
    told = mode_of(rayjob) == INTERACTIVE and bool(rayjob.get("spec", {}).get("jobId"))
    return told or bool(head_given(rayjob)) or bool(text(status, "jobStatus"))


def head_given(rayjob: RayJobObject) -> str:
    """The head that the job was given to; "" when none was."""
    return str((rayjob.get("metadata", {}).get("annotations") or {}).get(HEAD, ""))


def mode_of(rayjob: RayJobObject) -> str:
    return str(rayjob.get("spec", {}).get("submissionMode") or "K8sJobMode")


def name_of(rayjob: RayJobObject) -> str:
    return f"RayJob {rayjob.get('metadata', {}).get('name', '?')}"


def text(status: Mapping[str, Any], field: str) -> str:
    return str(status.get(field) or "")


def by_ray(heard: Heard) -> Fate | None:
    """How a job ended, as Ray has it; None while it is not over."""
    job = heard.job
    if job is None or not job.over:
        return None
    if fate_of(job, heard.output) is NOT_INSTALLED:
        return NOT_INSTALLED
    fate = fate_of(job, None)
    return AGENT_LOST if fate is USER and job.exit_code is None else fate


# One row each -------------------------------------------------------------------------------------------------------


def _failed(rayjob: RayJobObject, reason: str, job: str, heard: Heard) -> Observation | None:
    """AppFailed, SubmissionFailed, reasons of later operators, and Complete without an end that Ray told."""
    if heard is UNASKED:
        return None
    if heard.job is not None:
        fate = by_ray(heard)
        if fate is None:  # its submitter is over, the job is not
            return _running(rayjob, job, heard)
        return _over_at_ray(rayjob, fate, heard.job, heard.output)
    words = text(rayjob.get("status") or {}, "message")
    if text(rayjob.get("status") or {}, "jobDeploymentStatus") == "Complete":
        return _over(rayjob, AGENT_LOST)
    if reason != "AppFailed":
        cause = "submission" if reason == "SubmissionFailed" else "rayjob_failed"
        return _over(rayjob, Fate(Status.FAILED, cause, _INFRA))
    code = _code_in(words)
    if code is not None:
        return _over(rayjob, USER, code if code >= 0 else 128 - code)
    return _over(rayjob, HEAD_LOST if _NOT_THE_APP.search(words.partition("\n")[0]) else AGENT_LOST)


def _running(rayjob: RayJobObject, job: str, heard: Heard) -> Observation:
    """Ray has the job, or is about to."""
    if heard.job is not None:
        fate = by_ray(heard)
        if fate is not None:
            return _over_at_ray(rayjob, fate, heard.job, heard.output)
        if heard.job.status == "PENDING":
            return _observed(rayjob, Presence.STARTING, said(heard.job))
        return _observed(rayjob, Presence.ACTIVE)
    if heard.answer is Answer.UNKNOWN:
        if mode_of(rayjob) != INTERACTIVE and not job:
            return _observed(rayjob, Presence.STARTING, "KubeRay is about to give the job to Ray")
        return lost_head(rayjob, f"Ray knows nothing of the job {name_of(rayjob)} was given: its head was replaced")
    if job in ("", "PENDING"):
        return _observed(rayjob, Presence.STARTING, "Ray's dashboard does not answer")
    return _observed(rayjob, Presence.ACTIVE, "Ray's dashboard does not answer")


def _waiting(rayjob: RayJobObject, deployment: str) -> str:
    if deployment == "Suspended" or (not deployment and rayjob.get("spec", {}).get("suspend")):
        return f"{name_of(rayjob)} is suspended: it waits for its queue to admit it"
    if not deployment:
        return f"{name_of(rayjob)} is not looked at yet; is the KubeRay operator running?"
    return f"{name_of(rayjob)} is {deployment}"


def _over(rayjob: RayJobObject, fate: Fate, code: int | None = None, why: str = "") -> Observation:
    status = rayjob.get("status") or {}
    if not why:
        reason, words = text(status, "reason"), _first_line(text(status, "message"))
        why = f"{name_of(rayjob)} is {text(status, 'jobDeploymentStatus')}"
        why += f" ({reason})" if reason else ""
        if job := text(status, "jobStatus"):
            why += f", its job {job}"
        why += f": {words}" if words else ""
    return _observed(rayjob, Presence.ENDED, why, code, fate)


def _over_at_ray(rayjob: RayJobObject, fate: Fate, job: RayJob, output: Sequence[str] | None) -> Observation:
    seen = _over(rayjob, fate, job.exit_code, said(job, output))
    return replace(seen, hearsay=hearsay(fate))


def _observed(
    rayjob: RayJobObject, presence: Presence, why: str = "", code: int | None = None, fate: Fate | None = None
) -> Observation:
    status = rayjob.get("status") or {}
    return Observation(presence, why, code, text(status, "jobStatus"), text(status, "jobDeploymentStatus"), fate)


def _code_in(message: str) -> int | None:
    """Ray's own words come first, then what the job printed last, which may say anything."""
    match = _EXIT_CODE.search(message.partition("\n")[0])
    return int(match[1]) if match else None


def _first_line(message: str, longest: int = 300) -> str:
    line = message.strip().partition("\n")[0].strip()
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
