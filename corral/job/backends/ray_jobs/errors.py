"""What a Ray job's end means where its agent left no end record.

An end record is the agent's word, and wins. Without it there is Ray's: a status, a kind of error, and the exit code of
the entrypoint, which is our agent and ends with its command's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from corral.errors import ConfigError, InfraError
from corral.job.backends.base import Fate
from corral.job.backends.ray_jobs.api import RayJob
from corral.job.core.classify import one_line
from corral.job.protocol.states import FailureClass, Status

SUCCEEDED = Fate(Status.SUCCEEDED, "exit_code")
STOPPED = Fate(Status.CANCELLED, "stopped", FailureClass.CANCEL)
NOT_FOUND = Fate(Status.NOT_FOUND, "not_found", FailureClass.INFRA)
HEAD_LOST = Fate(Status.FAILED, "head_lost", FailureClass.INFRA)
AGENT_LOST = Fate(Status.FAILED, "agent_lost", FailureClass.INFRA)
NOT_INSTALLED = Fate(Status.FAILED, "not_installed", FailureClass.CONFIG)
USER = Fate(Status.FAILED, "exit_code", FailureClass.USER)


@dataclass(frozen=True)
class Meaning:
    """Of an error type. said: one clause."""

    fate: Fate
    said: str


def _infra(cause: str, said: str) -> Meaning:
    return Meaning(Fate(Status.FAILED, cause, FailureClass.INFRA), said)


ENTRYPOINT = "JOB_ENTRYPOINT_COMMAND_ERROR"
MEANINGS = {
    "RUNTIME_ENV_SETUP_FAILURE": Meaning(
        Fate(Status.FAILED, "runtime_env", FailureClass.CONFIG), "Ray could not set up the job's environment"
    ),
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": _infra("ray_start", "Ray did not start the job within its own limit"),
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": _infra("ray_start", "Ray could not start the job"),
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": _infra("ray_start", "Ray found no node for the job"),
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": _infra("ray", "Ray lost the job"),
    "JOB_SUPERVISOR_ACTOR_DIED": _infra("ray", "the node or the process of Ray that ran the job died"),
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": _infra("entrypoint", "Ray could not start the job's process"),
    ENTRYPOINT: Meaning(USER, "the job's process failed"),
}
UNKNOWN = _infra("ray", "Ray says that the job failed")

_NO_CORRAL = re.compile(r"No module named '?corral\b")
# Of an agent that did not come to its command: these say whose failure that is, the others that it crashed.
_TELLING = frozenset({ConfigError.exit_code, InfraError.exit_code, 126, 127})


def meaning(error_type: str | None) -> Meaning:
    return MEANINGS.get(error_type or "", UNKNOWN)


def fate_of(job: RayJob, output: Sequence[str] | None) -> Fate | None:
    """Of a job that is over without an end record.

    output: the last lines of its output, read to its end; None: it could not be read, and an end record may have been
    in it, so that the exit code is believed.
    """
    if job.status == "STOPPED":
        return STOPPED
    if job.status == "SUCCEEDED":
        return SUCCEEDED if job.exit_code == 0 else AGENT_LOST
    if job.error_type != ENTRYPOINT or output is None:
        return meaning(job.error_type).fate
    if any(_NO_CORRAL.search(line) for line in output):
        return NOT_INSTALLED
    return USER if job.exit_code in _TELLING else AGENT_LOST


def hearsay(fate: Fate | None) -> bool:
    """Whether an agent that is heard refutes it: Ray calls a job FAILED after one call to its supervisor that did not
    come through. What people do or ask for is no mistake of Ray's."""
    return fate is None or fate.failure_class not in (FailureClass.CANCEL, FailureClass.CONFIG)


def said(job: RayJob, output: Sequence[str] | None = ()) -> str:
    """One line about a job that has ended badly, or is not up yet."""
    if job.status == "STOPPED":
        return "it was stopped at Ray"
    if job.status == "SUCCEEDED":
        return "Ray says that it succeeded"
    if job.status != "FAILED":
        return one_line(job.message, 300)
    known = f"{meaning(job.error_type).said} ({job.error_type})" if job.error_type else UNKNOWN.said
    if job.error_type == ENTRYPOINT:
        # Ray's own message quotes the end of the output, of which only what the agent printed is fit to be shown.
        if output is None:
            return f"{known}; Ray cannot read its output any more"
        if any(_NO_CORRAL.search(line) for line in output):
            return f"the cluster's head has no Corral: {output[-1]}; install it there, or set nodes.python"
        return one_line(f"{known}: {output[-1]}" if output else known, 400)
    return one_line(f"{known}: {job.message}" if job.message else known, 400)
