"""Incidents of jobs that are brought up: pods that do not start, submitters that give up, queues that give and take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.job.protocol.states import JobState
from tests.job.backends.kube.containers import unpullable, unschedulable
from tests.job.backends.kuberay.incident import scene
from tests.job.backends.kuberay.place import Kubernetes_, kubernetes
from tests.job.service.reconciling import end_record


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        yield cluster


def there(it: Kubernetes_, name: str) -> dict[str, Any]:
    found = it.kube.find("rayjobs", name)
    assert found is not None
    return found


# Starting ------------------------------------------------------------------------------------------------------------


def test_2154_a_submitter_that_says_running_after_the_driver_failed(it: Kubernetes_) -> None:
    """A second submit with the same id fails at once; Ray itself is asked how the job ended."""

    async def life() -> None:
        async with scene(it, submission="K8sJobMode") as at:
            await at.runs()
            it.operator.held |= {"Running"}
            job = at.head.jobs[at.name]
            job.exit_code, job.status = 3, "FAILED"
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())


# Row 33 of docs/incidents.md, from pull request 3216: the submitter was tried again, found its job there, followed the
# rest of its log and ended with 0, so that its Kubernetes Job is complete.


@pytest.mark.parametrize("way", ["end record", "exit code of Ray"])
def test_33_a_second_submitter_that_ends_well_does_not_turn_red_into_green(it: Kubernetes_, way: str) -> None:
    async def life() -> None:
        async with scene(it, submission="K8sJobMode") as at:
            await at.runs()
            it.operator.held |= {"Running", "Complete"}
            if way == "end record":
                await at.agent_says(3)
            else:
                at.head.jobs[at.name].exit_code, at.head.jobs[at.name].status = 3, "FAILED"
            it.operator.set_status(at.name, jobDeploymentStatus="Complete", jobStatus="FAILED")
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())


def test_33_a_second_submitter_that_ends_while_the_job_runs_ends_nothing(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, submission="K8sJobMode") as at:
            await at.runs()
            it.operator.held |= {"Running", "Complete"}
            it.operator.set_status(at.name, jobDeploymentStatus="Complete", jobStatus="RUNNING")
            assert (await at.lets_pass(8.0)).state is JobState.RUNNING
            await at.agent_says(3)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())


def test_19_ray_calls_a_job_failed_whose_agent_is_heard(it: Kubernetes_) -> None:
    """Row 19 of docs/incidents.md: the operator believes it, and the job runs on to its end record."""

    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            job = at.head.jobs[at.name]
            job.status, job.error_type = "FAILED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"
            await at.is_in("Failed", "FAILED")
            for _ in range(10):
                await at.world.beat(at.job, "running")
                assert (await at.lets_pass(2.0)).state is JobState.RUNNING
            await at.world.runner.end(at.job, end_record(at.job, 0))
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


def test_4760_a_submitter_that_gave_up_before_the_head_was_ready(it: Kubernetes_) -> None:
    async def life() -> None:
        it.operator.held |= {"Running"}
        async with scene(it, submission="K8sJobMode") as at:
            await at.submit()
            await at.is_in("Running")
            it.operator.set_status(
                at.name, jobDeploymentStatus="Failed", reason="SubmissionFailed", message="BackoffLimitExceeded"
            )
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "submission")
            assert "BackoffLimitExceeded" in verdict.message

    asyncio.run(life())


def test_4178_initializing_for_ever_ends_with_the_start_deadline_that_quotes_the_scheduler(it: Kubernetes_) -> None:
    words = "0/3 nodes are available: 3 Insufficient huawei.com/Ascend910."
    it.operator.schedule = lambda pod: unschedulable(words)

    async def life() -> None:
        async with scene(it) as at:
            await at.submit(timeouts={"start": 60})
            await at.sees(words)
            await at.lets_pass(1.0)
            at.world.hand.time += 60
            verdict = await at.over()
            assert (verdict.status, verdict.cause) == ("TIMEOUT", "start")
            assert words in verdict.message

    asyncio.run(life())


def test_an_image_that_is_not_there_is_named(it: Kubernetes_) -> None:
    it.operator.schedule = lambda pod: unpullable("corral:typo")

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            await at.sees('ImagePullBackOff: Back-off pulling image "corral:typo"')
            await at.world.cancels(at.job)
            assert (await at.over()).status == "CANCELLED"

    asyncio.run(life())


@pytest.mark.slow
def test_pods_that_a_quota_forbids_are_told_from_events(it: Kubernetes_) -> None:
    it.operator.held |= {"Initializing"}

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            await at.is_in("Initializing")
            it.kube.note_event(there(it, at.name), "FailedToCreateRayCluster", "exceeded quota: pods=10")
            await at.sees("FailedToCreateRayCluster: exceeded quota: pods=10")
            await at.world.cancels(at.job)
            assert (await at.over()).status == "CANCELLED"

    asyncio.run(life())


def test_a_cluster_with_too_few_devices_waits_at_the_gate_without_limit_of_its_own(it: Kubernetes_) -> None:
    """The operator says Waiting for ever; the start deadline ends it, with the numbers."""

    async def life() -> None:
        async with scene(it) as at:
            await at.submit(resources={"nodes": 2, "accelerators_per_node": 4, "kind": "cpu"}, timeouts={"start": 60})
            await at.until(lambda: it.containers.every and len(it.containers.every[-1].nodes) == 2)
            at.head.nodes[1]["resources_total"] = {"CPU": 2.0}
            await at.is_in("Waiting")
            await at.sees("1 of 2 nodes with 4 CPU")
            at.world.hand.time += 60
            verdict = await at.over()
            assert (verdict.status, verdict.cause) == ("TIMEOUT", "start")
            assert "1 of 2 nodes with 4 CPU" in verdict.message

    asyncio.run(life())
    assert it.containers.every[-1].submissions == []


def test_a_node_that_comes_late_is_waited_for_and_named_meanwhile(it: Kubernetes_) -> None:
    words = "0/3 nodes are available: 3 Insufficient huawei.com/Ascend910."
    late = [True]
    it.operator.schedule = lambda pod: unschedulable(words) if late and "worker" in pod["metadata"]["name"] else {}

    async def life() -> None:
        async with scene(it) as at:
            await at.submit(resources={"nodes": 2, "accelerators_per_node": 4, "kind": "cpu"})
            await at.sees(f"node-worker-00003: Unschedulable: {words}")
            late.clear()
            await at.is_in("Running", "RUNNING")
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


@pytest.mark.parametrize("state", ["Suspended", "Initializing", "Waiting", "Running"])
def test_a_cancel_leaves_nothing_wherever_the_job_is(it: Kubernetes_, state: str) -> None:
    queued = {"scheduler": "kueue", "queue": "team"} if state == "Suspended" else {}

    async def life() -> None:
        it.operator.held |= {state}
        async with scene(it, **queued) as at:
            await at.submit()
            await at.is_in(state)
            await at.world.cancels(at.job)
            assert (await at.over()).status == "CANCELLED"

    asyncio.run(life())
    assert sum(len(made) for made in it.operator.clusters.values()) == (state in ("Waiting", "Running"))


@pytest.mark.slow
def test_the_operators_own_start_deadline(it: Kubernetes_) -> None:
    it.operator.held |= {"Initializing"}

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            await at.is_in("Initializing")
            it.operator.set_status(at.name, jobDeploymentStatus="Failed", reason="PreRunningDeadlineExceeded")
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("TIMEOUT", "timeout", "start")

    asyncio.run(life())


@pytest.mark.slow
def test_an_operator_that_is_not_there(it: Kubernetes_) -> None:
    it.operator.paused.set()

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            await at.sees("is the KubeRay operator running?")
            await at.world.cancels(at.job)
            assert (await at.over()).status == "CANCELLED"

    asyncio.run(life())


# Queues --------------------------------------------------------------------------------------------------------------


def test_kueue_admits_and_takes_away(it: Kubernetes_) -> None:
    """A job that was taken off its nodes is lost there, and never given to the nodes it gets afterwards."""

    async def life() -> None:
        async with scene(it, scheduler="kueue", queue="team") as at:
            await at.submit()
            await at.is_in("Suspended")
            await at.sees("it waits for its queue to admit it")
            assert it.kube.objects("rayclusters") == []
            it.operator.admit(at.name)
            await at.is_in("Running", "RUNNING")
            await at.world.beat(at.job, "preflight")
            it.operator.admit(at.name, False)
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.cause) == ("FAILED", "infra", "preempted")

    asyncio.run(life())
    assert sum(len(head.submissions) for head in it.containers.every) == 1


@pytest.mark.slow
def test_kueue_gives_other_nodes_before_anybody_looked(it: Kubernetes_) -> None:
    async def life() -> None:
        async with scene(it, scheduler="kueue", queue="team") as at:
            await at.submit()
            await at.is_in("Suspended")
            it.operator.admit(at.name)
            await at.is_in("Running", "RUNNING")
            it.kube.faults.hang(verb="watch", times=None)
            it.kube.faults.watch("freeze", times=1, resource="rayjobs")
            it.operator.admit(at.name, False)
            await at.is_in("Suspended")
            it.operator.admit(at.name)
            await at.is_in("Running")
            it.kube.faults.clear()
            verdict = await at.over()
            assert (verdict.failure_class, verdict.cause) == ("infra", "head_lost")

    asyncio.run(life())
    assert sum(len(head.submissions) for head in it.containers.every) == 1
