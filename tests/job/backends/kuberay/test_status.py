"""The table from a RayJob's fields to an observation and, through the core, to a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from corral.job.backends.base import Observation, Presence
from corral.job.backends.kuberay.status import SILENT, UNASKED, UNKNOWN, gone, head_given, judge, known, lost_head
from corral.job.backends.ray_jobs.api import RayJob
from corral.job.core.classify import lost
from corral.job.protocol.verdict import client_exit_code

NAME = "rj-0123456789ab-a1"
HEAD_GONE = "The head pod of RayCluster rj-x is not found"
WORDS = "Job entrypoint command failed with exit code 7, last available logs (truncated to 20,000 chars):\nexit code 9"


def rayjob(deployment: str = "", job: str = "", reason: str = "", message: str = "", **more: Any) -> dict[str, Any]:
    spec = {"submissionMode": "InteractiveMode", "jobId": NAME, **more.pop("spec", {})}
    status = {"jobDeploymentStatus": deployment, "jobStatus": job, "reason": reason, "message": message}
    return {"metadata": {"name": NAME, **more}, "spec": spec, "status": {k: v for k, v in status.items() if v}}


def ray(status: str, code: int | None = None, error: str | None = None, message: str = "", *output: str) -> Any:
    return known(RayJob(NAME, status, message, error, code), output or None)


DEADLINE = "JobDeploymentStatusTransitionGracePeriodExceeded"
ENTRY, RUNTIME = "JOB_ENTRYPOINT_COMMAND_ERROR", "RUNTIME_ENV_SETUP_FAILURE"

# deployment, job, reason, message, what Ray says, status, class, cause, exit code of the client
VERDICTS = [
    ("ValidationFailed", "", "ValidationFailed", "name too long", UNASKED, "FAILED", "config", "validation", 78),
    ("ValidationFailed", "RUNNING", "", "", UNASKED, "FAILED", "config", "validation", 78),
    ("Failed", "RUNNING", "DeadlineExceeded", "", UNASKED, "TIMEOUT", "timeout", "run", 124),
    ("Failed", "RUNNING", "DeadlineExceeded", "", ray("RUNNING"), "TIMEOUT", "timeout", "run", 124),
    ("Failed", "", "DeadlineExceeded", "", UNASKED, "TIMEOUT", "timeout", "start", 124),
    ("Failed", "", "PreRunningDeadlineExceeded", "", UNASKED, "TIMEOUT", "timeout", "start", 124),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", 7, ENTRY), "FAILED", "user", "exit_code", 7),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", 78, ENTRY), "FAILED", "config", "exit_code", 78),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", 137, ENTRY), "FAILED", "infra", "killed", 75),
    ("Failed", "FAILED", "AppFailed", HEAD_GONE, ray("FAILED", 7, ENTRY), "FAILED", "user", "exit_code", 7),
    ("Failed", "FAILED", "AppFailed", WORDS, SILENT, "FAILED", "user", "exit_code", 7),
    ("Failed", "FAILED", "AppFailed", HEAD_GONE, SILENT, "FAILED", "infra", "head_lost", 75),
    ("Failed", "RUNNING", "AppFailed", "Job rj-x does not exist on the Ray cluster", UNKNOWN, "FAILED", "infra",
     "head_lost", 75),
    ("Failed", "RUNNING", "AppFailed", "submitter finished, but the job was not found", SILENT, "FAILED", "infra",
     "head_lost", 75),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", None, RUNTIME), "FAILED", "config", "runtime_env", 78),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), "FAILED", "infra",
     "ray", 75),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", None, ENTRY), "FAILED", "infra", "agent_lost", 75),
    ("Failed", "FAILED", "AppFailed", "", ray("FAILED", 1, ENTRY, "", "x: No module named 'corral'"), "FAILED",
     "config", "not_installed", 78),
    ("Failed", "FAILED", "AppFailed", "actor died", SILENT, "FAILED", "infra", "agent_lost", 75),
    ("Failed", "RUNNING", "SubmissionFailed", "BackoffLimitExceeded", SILENT, "FAILED", "infra", "submission", 75),
    ("Failed", "RUNNING", "SubmissionFailed", "", ray("SUCCEEDED", 0), "SUCCEEDED", None, "exit_code", 0),
    ("Failed", "RUNNING", "SubmissionFailed", "", ray("FAILED", 3, ENTRY), "FAILED", "user", "exit_code", 3),
    ("Failed", "", "SubmissionFailed", "", UNKNOWN, "FAILED", "infra", "submission", 75),
    ("Failed", "FAILED", DEADLINE, "", UNASKED, "FAILED", "infra", "no_status", 75),
    ("Failed", "RUNNING", "JobStatusCheckTimeoutExceeded", "", UNASKED, "FAILED", "infra", "status_check", 75),
    ("Failed", "RUNNING", "SomethingNew", "", SILENT, "FAILED", "infra", "rayjob_failed", 75),
    ("Complete", "SUCCEEDED", "", "", UNASKED, "SUCCEEDED", None, "exit_code", 0),
    ("Complete", "STOPPED", "", "", UNASKED, "CANCELLED", "cancel", "stopped", 130),
    ("Complete", "RUNNING", "", "", SILENT, "FAILED", "infra", "agent_lost", 75),
    ("Complete", "", "", "", UNKNOWN, "FAILED", "infra", "agent_lost", 75),
    ("Complete", "FAILED", "", "", ray("FAILED", 3, ENTRY), "FAILED", "user", "exit_code", 3),
    ("Complete", "RUNNING", "", "", ray("SUCCEEDED", 0), "SUCCEEDED", None, "exit_code", 0),
    ("Retrying", "FAILED", "AppFailed", "", UNASKED, "FAILED", "infra", "operator_retry", 75),
    ("Suspending", "RUNNING", "", "", UNASKED, "FAILED", "infra", "preempted", 75),
    ("Suspended", "", "", "", UNASKED, "FAILED", "infra", "preempted", 75),
    ("Running", "RUNNING", "", "", ray("SUCCEEDED", 0), "SUCCEEDED", None, "exit_code", 0),
    ("Running", "RUNNING", "", "", ray("STOPPED"), "CANCELLED", "cancel", "stopped", 130),
    ("Running", "RUNNING", "", "", ray("FAILED", 3, ENTRY), "FAILED", "user", "exit_code", 3),
    ("Running", "RUNNING", "", "", UNKNOWN, "FAILED", "infra", "head_lost", 75),
    ("Waiting", "", "", "", UNKNOWN, "FAILED", "infra", "head_lost", 75),
]  # fmt: skip


@pytest.mark.parametrize(("deployment", "job", "reason", "message", "heard", *"sfce"), VERDICTS)
def test_each_end_has_its_verdict(deployment, job, reason, message, heard, s, f, c, e):
    seen = judge(rayjob(deployment, job, reason, message), heard)
    assert seen is not None
    assert seen.presence is Presence.ENDED
    assert (seen.rayjob_status, seen.job_deployment_status) == (job, deployment)
    verdict = lost(seen, 6.0)
    assert (verdict.status, verdict.failure_class, verdict.cause) == (s, f, c)
    assert client_exit_code(verdict) == e
    assert "\n" not in verdict.message


GIVEN: dict[str, Any] = {"annotations": {"corral.dev/head": "uid-1"}}
LIVES = [
    (rayjob("", spec={"jobId": ""}), UNASKED, Presence.STARTING, "is the KubeRay operator running"),
    (rayjob("", spec={"jobId": "", "suspend": True}), UNASKED, Presence.STARTING, "queue"),
    (rayjob("Suspended", spec={"jobId": ""}), UNASKED, Presence.STARTING, "queue"),
    (rayjob("Initializing", spec={"jobId": ""}), UNASKED, Presence.STARTING, "Initializing"),
    (rayjob("Waiting", spec={"jobId": ""}), UNASKED, Presence.STARTING, "Waiting"),
    (rayjob("Waiting"), ray("PENDING", message="Job has not started yet"), Presence.STARTING, "not started"),
    (rayjob("Waiting"), ray("RUNNING"), Presence.ACTIVE, ""),
    (rayjob("Waiting", spec={"jobId": ""}, **GIVEN), UNKNOWN, Presence.STARTING, "Waiting"),
    (rayjob("Waiting", spec={"jobId": ""}, **GIVEN), ray("RUNNING"), Presence.ACTIVE, ""),
    (rayjob("Running"), SILENT, Presence.STARTING, "does not answer"),
    (rayjob("Running", "RUNNING"), SILENT, Presence.ACTIVE, "does not answer"),
    (rayjob("Running", "SUCCEEDED"), SILENT, Presence.ACTIVE, "does not answer"),
    (rayjob("Failed", "RUNNING", "SubmissionFailed"), ray("RUNNING"), Presence.ACTIVE, ""),
    (rayjob("Complete", "RUNNING"), ray("RUNNING"), Presence.ACTIVE, ""),
    (rayjob("Running", spec={"submissionMode": "HTTPMode"}), UNKNOWN, Presence.STARTING, "about to"),
]


@pytest.mark.parametrize(("seen", "heard", "presence", "said"), LIVES)
def test_what_lives(seen, heard, presence, said):
    found = judge(seen, heard)
    assert found is not None
    assert (found.presence, found.fate) == (presence, None)
    assert said in found.message


@pytest.mark.parametrize("mode", ["HTTPMode", "K8sJobMode", "SidecarMode"])
def test_a_job_the_operator_would_start_again_on_a_new_head_is_lost(mode):
    found = judge(rayjob("Running", "RUNNING", spec={"submissionMode": mode}), UNKNOWN)
    assert found is not None
    assert (found.presence, found.fate.cause) == (Presence.ENDED, "head_lost")


@pytest.mark.parametrize(
    "seen",
    [
        rayjob("Running", "RUNNING"),
        rayjob("Waiting"),
        rayjob("Waiting", spec={"jobId": ""}, **GIVEN),
        rayjob("Failed", "RUNNING", "SubmissionFailed"),
        rayjob("Failed", "FAILED", "AppFailed"),
        rayjob("Complete", "FAILED"),
    ],
)
def test_ray_is_asked_before_these_are_judged(seen):
    assert judge(seen, UNASKED) is None
    assert judge(seen, SILENT) is not None


def test_what_is_deleted_by_others_is_not_found():
    deleted = judge(rayjob("Running", "RUNNING", deletionTimestamp="2026-11-30T12:00:00Z"))
    assert deleted is not None
    assert lost(deleted, 6.0).status == "NOT_FOUND"
    absent = gone(NAME)
    assert absent.presence is Presence.ABSENT
    verdict = lost(absent, 6.0)
    assert (verdict.status, verdict.failure_class, client_exit_code(verdict)) == ("NOT_FOUND", "infra", 75)
    assert NAME in verdict.message


def test_the_words_of_the_job_do_not_decide():
    """A line that a job printed last is quoted below Ray's own words, and may look like those."""
    said = "Unexpected error occurred: actor died\nfailed with exit code 0\nhead pod not found"
    found = judge(rayjob("Failed", "FAILED", "AppFailed", said), SILENT)
    assert found is not None
    assert (found.exit_code, found.fate.cause) == (None, "agent_lost")
    assert "head pod" not in found.message


def test_a_lost_head_names_what_was_seen():
    seen = lost_head(rayjob("Running", "RUNNING"), "pod rj-x-head is gone")
    assert isinstance(seen, Observation)
    assert "pod rj-x-head is gone" in lost(seen, 6.0).message


def test_the_head_is_read_from_the_annotation():
    assert head_given(rayjob(annotations={"corral.dev/head": "uid-1"})) == "uid-1"
    assert head_given(rayjob()) == ""


@pytest.mark.parametrize("broken", [{}, {"metadata": {}, "spec": {}, "status": None}, {"status": {"jobStatus": None}}])
def test_an_object_without_status_is_one_that_starts(broken):
    found = judge(broken)
    assert found is not None
    assert found.presence is Presence.STARTING
