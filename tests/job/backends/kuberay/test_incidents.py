"""Failures that users of KubeRay reported, one by one, through the whole service: the right verdict, the right class,
and nothing left. Numbers are those of issues and pull requests of KubeRay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.errors import InfraError
from corral.job.protocol.states import JobState
from tests.job.backends.kube.containers import unschedulable
from tests.job.backends.kuberay.incident import MODES, scene
from tests.job.backends.kuberay.place import FAST, Kubernetes_, kubernetes


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        yield cluster


def one_cluster(it: Kubernetes_) -> None:
    """No submission ever had a second RayCluster, and nothing was given to Ray twice."""
    assert all(len(made) == 1 for made in it.operator.clusters.values()), it.operator.clusters
    given = [name for head in it.containers.every for name in head.submissions]
    assert len(given) == len(set(given)), given


def there(it: Kubernetes_, name: str) -> dict[str, Any]:
    found = it.kube.find("rayjobs", name)
    assert found is not None
    return found


def left_over(it: Kubernetes_, name: str, finalizers: list[str]) -> None:
    """A Secret of a submission of this service that nobody knows any more."""
    (owner,) = {one["metadata"]["labels"]["corral.dev/service"] for one in it.kube.objects("rayjobs")}
    labels = {"corral.dev/service": owner, "corral.dev/submission": name}
    about = {"name": name, "labels": labels, "finalizers": finalizers}
    it.kube.create("secrets", {"apiVersion": "v1", "kind": "Secret", "metadata": about})


# Two sources of truth ------------------------------------------------------------------------------------------------


def test_2314_a_deadline_that_does_not_stop_the_driver(it: Kubernetes_) -> None:
    """Deployment Failed, job RUNNING for ever: it is a time-out, the job is told to stop and all of it is removed."""

    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            head = at.head
            it.operator.set_status(
                at.name, jobDeploymentStatus="Failed", reason="DeadlineExceeded", message="passed activeDeadlineSeconds"
            )
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("TIMEOUT", "timeout", "run")
            assert "DeadlineExceeded" in verdict.message
            assert head.jobs[at.name].stopped

    asyncio.run(life())
    one_cluster(it)


def test_2314_a_dead_submitter_does_not_end_a_healthy_job(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, submission="K8sJobMode") as at:
            await at.runs()
            it.operator.set_status(at.name, jobDeploymentStatus="Failed", reason="SubmissionFailed")
            job = await at.lets_pass(8.0)
            assert job.state is JobState.RUNNING
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


@pytest.mark.slow
def test_2314_a_dead_submitter_and_a_job_that_ray_lost(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, submission="K8sJobMode") as at:
            await at.runs()
            at.head.silent.set()
            it.operator.set_status(at.name, jobDeploymentStatus="Failed", reason="SubmissionFailed")
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "submission")
            at.head.silent.clear()

    asyncio.run(life())


def test_a_job_that_others_stopped_is_complete_and_no_success(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            at.head.stop(at.name)
            await at.is_in("Complete", "STOPPED")
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("CANCELLED", "cancel", "stopped")

    asyncio.run(life())


def test_the_agents_end_record_wins_over_what_the_operator_says(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.operator.set_status(at.name, jobDeploymentStatus="Failed", reason="JobStatusCheckTimeoutExceeded")
            await at.agent_says(3)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())


def test_validation_failed_is_terminal_though_the_operator_leaves_it_at_that(it: Kubernetes_) -> None:
    async def life() -> None:
        it.operator.held |= {"Initializing", "ValidationFailed"}
        async with scene(it) as at:
            await at.submit()
            await at.is_in("Initializing")
            it.operator.set_status(at.name, jobDeploymentStatus="ValidationFailed", message="name is too long")
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "config", "validation")
            assert "name is too long" in verdict.message

    asyncio.run(life())


# The head ------------------------------------------------------------------------------------------------------------


def test_3860_the_head_is_lost_and_the_new_one_has_no_job(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.operator.lose_head(at.name)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "head_lost")

    asyncio.run(life())
    one_cluster(it)
    assert it.containers.every[-1].submissions == []


@pytest.mark.slow
def test_3860_the_head_is_lost_and_no_new_one_comes(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.operator.schedule = lambda pod: unschedulable("0/3 nodes are available: 3 Insufficient cpu.")
            it.operator.lose_head(at.name)
            verdict = await at.over()
            assert (verdict.failure_class, verdict.cause) == ("infra", "head_lost")
            assert "Insufficient cpu" in verdict.message

    asyncio.run(life())
    one_cluster(it)


def test_4824_http_mode_would_run_the_job_again_on_a_new_head(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, submission="HTTPMode") as at:
            await at.runs()
            await at.until(lambda: "corral.dev/head" in there(it, at.name)["metadata"]["annotations"])
            it.operator.lose_head(at.name)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "head_lost")

    asyncio.run(life())


def test_4914_http_mode_stays_running_without_a_head(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, submission="HTTPMode") as at:
            await at.runs()
            await at.until(lambda: "corral.dev/head" in there(it, at.name)["metadata"]["annotations"])
            it.operator.schedule = lambda pod: unschedulable("no node")
            it.operator.lose_head(at.name)
            verdict = await at.over()
            assert (verdict.failure_class, verdict.cause) == ("infra", "head_lost")

    asyncio.run(life())


@pytest.mark.slow
def test_a_dashboard_that_dies_and_comes_back_says_nothing_about_the_job(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            at.head.silent.set()
            job = await at.lets_pass(8.0)
            assert job.state is JobState.RUNNING
            at.head.silent.clear()
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Job rj-x not found on the new head pod", "head_lost"),
        pytest.param("The head pod is gone", "head_lost", marks=pytest.mark.slow),
        pytest.param("", "agent_lost", marks=pytest.mark.slow),
    ],
)
def test_3903_app_failed_without_an_exit_code_is_not_the_apps(it: Kubernetes_, message: str, cause: str) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            at.head.silent.set()
            it.operator.set_status(
                at.name, jobDeploymentStatus="Failed", reason="AppFailed", message=message, jobStatus="FAILED"
            )
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", cause)
            at.head.silent.clear()

    asyncio.run(life())


@pytest.mark.slow
def test_app_failed_with_an_exit_code_is_the_apps(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            job = at.head.jobs[at.name]
            job.exit_code, job.status = 7, "FAILED"
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 7)

    asyncio.run(life())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("JobDeploymentStatusTransitionGracePeriodExceeded", "no_status"),
        pytest.param("JobStatusCheckTimeoutExceeded", "status_check", marks=pytest.mark.slow),
    ],
)
def test_what_the_operator_gave_up_on_is_the_infrastructures(it: Kubernetes_, reason: str, cause: str) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs(retry={"infra": 1})
            it.operator.set_status(at.name, jobDeploymentStatus="Failed", reason=reason)
            while at.world.job(at.job).attempt == 1:
                await at.lets_pass(1.0)
            await at.is_in("Running", "RUNNING")  # the second attempt, with a cluster of its own
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())
    one_cluster(it)


# Ending --------------------------------------------------------------------------------------------------------------


def test_a_rayjob_that_others_deleted_is_not_found(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.kube.delete("rayjobs", at.name)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class) == ("NOT_FOUND", "infra")

    asyncio.run(life())


def test_4767_a_finaliser_that_is_never_removed_is_named_and_left(it: Kubernetes_) -> None:
    """The verdict stands; the reaper goes on, and removes the rest when the operator lets go."""
    short = FAST.__class__(**{**vars(FAST), "removal": 0.3})
    it.operator.keeps_finalizer = True

    async def life() -> None:
        async with scene(it, bounds=short) as at:
            await at.runs()
            await at.agent_says(0)
            await at.world.reaches(at.job, JobState.CLEANING)
            with pytest.raises(InfraError, match=r"finaliser ray\.io/rayjob-finalizer is not removed"):
                await at.backend.destroy(at.name)
            await at.lets_pass(3.0)
            at.world.hand.time += 121
            job = await at.world.ends(at.job)
            assert job.verdict is not None
            assert job.verdict.status == "SUCCEEDED"
            warnings = [event["message"] for event in at.world.events(at.job) if event["type"] == "warning"]
            assert any("the reaper goes on" in warning for warning in warnings)
            kept = it.kube.find("rayjobs", at.name)
            assert kept is not None
            assert kept["metadata"]["finalizers"] == ["ray.io/rayjob-finalizer"]
            assert await at.backend.list_owned() == [at.name]
            it.operator.keeps_finalizer = False
            await at.world.runner._attempts.reap()
            it.nothing_left()

    asyncio.run(life())


def test_one_that_cannot_be_removed_does_not_keep_the_others(it: Kubernetes_) -> None:
    """Of several left-overs the reaper removes those that it can."""
    short = FAST.__class__(**{**vars(FAST), "removal": 0.3})

    async def life() -> None:
        async with scene(it, bounds=short) as at:
            await at.runs()
            stuck = at.name
            left_over(it, "rj-000000000000-a1", ["example.com/quota"])
            left_over(it, "rj-ffffffffffff-a1", [])
            await at.world.runner._attempts.reap()
            assert [one["metadata"]["name"] for one in it.kube.objects("secrets")] == ["rj-000000000000-a1", stuck]
            it.kube.patch("secrets", "rj-000000000000-a1", {"metadata": {"finalizers": []}})
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


def test_a_raycluster_that_lost_its_rayjob_is_removed(it: Kubernetes_) -> None:
    """Somebody deleted the RayJob and kept what it had made."""

    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.operator.paused.set()
            it.kube.delete("rayjobs", at.name, propagation="Orphan")
            rayjob = it.kube.find("rayjobs", at.name)
            assert rayjob is None or rayjob["metadata"]["deletionTimestamp"]
            it.operator.paused.clear()
            assert (await at.over()).status == "NOT_FOUND"

    asyncio.run(life())


def test_a_rayjob_of_somebody_else_is_left_alone_and_named(it: Kubernetes_) -> None:
    body = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "rj-000000000001-a1"}, "spec": {}}
    it.kube.create("rayjobs", body | {"spec": {"suspend": True, "rayClusterSpec": SMALL}})

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            job = await at.world.ends(at.job)
            assert job.verdict is not None
            assert (job.verdict.status, job.verdict.failure_class) == ("FAILED", "config")
            assert "RayJob rj-000000000001-a1 in namespace corral is there" in job.verdict.message
            assert await at.backend.list_owned() == []

    asyncio.run(life())
    assert len(it.kube.objects("rayjobs")) == 1
    it.kube.delete("rayjobs", "rj-000000000001-a1")


@pytest.mark.parametrize("mode", MODES)
def test_other_submission_modes_run_and_end_and_the_service_says_what_is_lost(
    it: Kubernetes_, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        async with scene(it, submission=mode) as at:
            (said,) = [text for text in caplog.messages if text.startswith("kubernetes.submission")]
            assert said.startswith(
                f"kubernetes.submission is {mode}: the job may start before Ray has all of its nodes"
            )
            await at.runs()
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())
    one_cluster(it)


SMALL = {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "x"}]}}}}
