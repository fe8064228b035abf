"""What Ray says of a job and of its nodes, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.errors import ConfigError
from corral.job.backends.base import ANY, Placement, Presence
from corral.job.backends.ray_jobs.api import RayJob, RayNode
from corral.job.backends.ray_jobs.attempt import (
    LARGEST_BOARDING,
    boarding_of,
    gate,
    observation_of,
    resource_of,
    submission_of,
)
from corral.job.backends.ray_jobs.errors import MEANINGS
from corral.job.core.classify import lost
from corral.job.protocol.agent import AgentSpec, Boarding
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Nodes, Settings

NAME = "rj-0123456789ab-a1"
ENTRY = "JOB_ENTRYPOINT_COMMAND_ERROR"
USER, CONFIG, INFRA = FailureClass.USER, FailureClass.CONFIG, FailureClass.INFRA
FAILED, SUCCEEDED, CANCELLED = Status.FAILED, Status.SUCCEEDED, Status.CANCELLED

# Of jobs without an end record. Output None: Ray could not read it.
ENDS = [
    (
        RayJob(NAME, "FAILED", "pip: no such package", "RUNTIME_ENV_SETUP_FAILURE"),
        [],
        FAILED,
        CONFIG,
        "no such package",
    ),
    (RayJob(NAME, "FAILED", "", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), [], FAILED, INFRA, "its own limit"),
    (RayJob(NAME, "FAILED", "x", "JOB_SUPERVISOR_ACTOR_START_FAILURE"), [], FAILED, INFRA, "could not start"),
    (RayJob(NAME, "FAILED", "x", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"), [], FAILED, INFRA, "found no node"),
    (RayJob(NAME, "FAILED", "x", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"), [], FAILED, INFRA, "lost the job"),
    (RayJob(NAME, "FAILED", "node died", "JOB_SUPERVISOR_ACTOR_DIED"), [], FAILED, INFRA, "node died"),
    (RayJob(NAME, "FAILED", "x", "JOB_ENTRYPOINT_COMMAND_START_ERROR"), [], FAILED, INFRA, "the job's process"),
    (RayJob(NAME, "FAILED", "x", "SOMETHING_NEW"), [], FAILED, INFRA, "SOMETHING_NEW"),
    (RayJob(NAME, "FAILED", "", None), [], FAILED, INFRA, "Ray says that the job failed"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 7), None, FAILED, USER, "exit code 7"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 137), None, FAILED, INFRA, "SIGKILL"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 1), ["Error: so"], FAILED, INFRA, "Error: so"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 78), ["no bundle"], FAILED, CONFIG, "no bundle"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 75), ["no service"], FAILED, INFRA, "no service"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 127), ["python3: not found"], FAILED, CONFIG, "python3: not found"),
    (RayJob(NAME, "FAILED", "logs…", ENTRY, 1), ["p: No module named corral"], FAILED, CONFIG, "set nodes.python"),
    (RayJob(NAME, "SUCCEEDED", "", None, 0), [], SUCCEEDED, None, "no end record"),
    (RayJob(NAME, "SUCCEEDED", "", None, None), [], FAILED, INFRA, "no end record"),
    (RayJob(NAME, "STOPPED", "", None, None), [], CANCELLED, FailureClass.CANCEL, "stopped at Ray"),
]


@pytest.mark.parametrize(("job", "output", "status", "failure_class", "said"), ENDS)
def test_how_a_job_ended_that_left_no_end_record(job, output, status, failure_class, said):
    seen = observation_of(job, output)
    assert seen.presence is Presence.ENDED
    assert "logs…" not in seen.message  # Ray's quote of the output is neither redacted nor ours
    verdict = lost(seen, 6.0)
    assert (verdict.status, verdict.failure_class) == (status, failure_class)
    assert said in verdict.message
    assert seen.rayjob_status == job.status
    assert seen.job_deployment_status == ("Failed" if job.status == "FAILED" else "Complete")


def test_every_error_type_of_ray_has_a_meaning():
    common = pytest.importorskip("ray.dashboard.modules.job.common")
    assert {one.value for one in common.JobErrorType} == set(MEANINGS)


def test_jobs_that_are_not_over():
    waiting = observation_of(RayJob(NAME, "PENDING", "Job has not started yet."))
    assert (waiting.presence, waiting.job_deployment_status) == (Presence.STARTING, "Initializing")
    assert waiting.message == "Job has not started yet."
    running = observation_of(RayJob(NAME, "RUNNING", "Job is currently running."))
    assert (running.presence, running.message, running.job_deployment_status) == (Presence.ACTIVE, "", "Running")
    assert observation_of(None).presence is Presence.ABSENT


def node(name: str, alive: bool = True, head: bool = False, **resources: float) -> RayNode:
    return RayNode(f"id-{name}", name, alive, resources, "10.0.0.1", head)


TWO = Resources(nodes=2, accelerators_per_node=4, kind="npu")
SEPARATE = Placement(head="separate")
W1, W2 = node("w1", NPU=4), node("w2", NPU=8)
GATES = [
    ([], ANY, "0 of 2 nodes with 4 NPU"),
    ([W1, node("w2", NPU=2)], ANY, "1 of 2 nodes with 4 NPU; w2 has 2"),
    ([W1, node("w2", alive=False, NPU=4)], ANY, "1 of 2 nodes with 4 NPU; w2 is dead"),
    ([node("h", head=True, CPU=4), W1], ANY, "1 of 2 nodes with 4 NPU; h has 0"),
    ([node("h", head=True, NPU=4), W1], ANY, None),
    ([node("h", head=True), W1, W2], ANY, None),
    ([node("h", head=True), W1, W2], SEPARATE, None),
    ([node("h", head=True, NPU=4), W1], SEPARATE, "the head is to be separate, but h, the cluster's head, has 4 NPU"),
    ([node("h", head=True), W1], SEPARATE, "1 of 2 nodes with 4 NPU; h has 0"),
    ([W1, node("h", head=True), node("h"), node("w2", NPU=2)], ANY, "1 of 2 nodes with 4 NPU; h has 0 (2 times); w2"),
    ([node(f"w{n}", NPU=1) for n in range(6)], ANY, "0 of 2 nodes with 4 NPU; w0 has 1; w1 has 1; w2 has 1; w3 has 1"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "placement", "said"), GATES)
def test_what_a_cluster_lacks_for_a_job_is_said_with_the_numbers(nodes, placement, said):
    found = gate(nodes, TWO, placement, "NPU")
    assert found is None if said is None else found is not None and found.startswith(said)


def test_devices_of_a_kind():
    nodes = [node("h", CPU=4), node("w", CPU=4, GPU=1)]
    assert [resource_of(kind, nodes) for kind in ("cpu", "gpu", "npu", "auto")] == ["CPU", "GPU", "NPU", "GPU"]
    assert resource_of("auto", [*nodes, node("n", NPU=1)]) == "NPU"
    assert resource_of("auto", [node("n", alive=False, NPU=1)]) == "CPU"


def spec(**more: object) -> AgentSpec:
    given = {
        "job_id": "rj-0123456789ab", "attempt": 1, "submission_id": NAME, "service_url": "http://s", "cwd": "source",
        "command": ["bash", "x; rm -rf $HOME"], "nodes": 1, "devices_per_node": 1, "token": "secret-token",
        "secrets": {"KEY": "secret-value"},
    }  # fmt: skip
    return AgentSpec(**given | more)


def test_what_the_cluster_is_given_holds_no_secret_and_no_shell_text(tmp_path: Path):
    settings = Settings(tmp_path, nodes=Nodes(agent_dir="/scratch/jobs", python="/opt/py"))
    about = {"repository": "o/r", "corral_job": "a lie"}
    asked = submission_of(spec(), settings, Placement(about=about), owner="0123456789ab")
    assert asked.entrypoint.startswith("/opt/py -m corral.job.agent.join # ")
    assert asked.metadata["repository"] == "o/r"
    assert asked.metadata["corral_job"] == "rj-0123456789ab"
    assert asked.metadata["corral_service"] == "0123456789ab"
    boarding = Boarding.decode(asked.env["CORRAL_AGENT_BOARDING"])
    assert (boarding.join, boarding.root, boarding.secret_env) == (True, "/scratch/jobs", [])
    assert "secret" not in boarding.model_dump_json().replace("secret_env", "").replace('"secrets":{}', "")
    assert asked.env["CORRAL_AGENT_TOKEN"] == "secret-token"
    given = submission_of(spec(), settings, ANY, owner="0123456789ab", secret_env=["KEY"], agent_env=False)
    assert set(given.env) == {"RAY_JOB_STOP_WAIT_TIME_S"}
    assert not Boarding.decode(boarding_of(spec(), settings, ["KEY"])).join
    assert not Boarding.decode(boarding_of(spec(secrets={}), settings)).join
    assert Boarding.decode(boarding_of(spec(secrets={}, bundle="0" * 64), settings)).join


def test_a_job_that_does_not_fit_into_a_variable_is_refused(tmp_path: Path):
    import secrets

    env = {"LONG": secrets.token_hex(LARGEST_BOARDING)}
    with pytest.raises(ConfigError, match="put them into a file of the bundle"):
        boarding_of(spec(env=env), Settings(tmp_path))
