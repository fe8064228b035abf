"""Who starts now: all or nothing, in order, within quota."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.job.backends.base import Capacity
from corral.job.core.admission import admit, never_fits, resources_of
from corral.job.core.machine import HOLDS_DEVICES
from corral.job.protocol.states import JobState
from tests.job.core.cases import START, job, request

CAPACITY = Capacity(devices=16, nodes=4, devices_per_node=8)


def queued(name: str, nodes: int, devices: int, priority: int = 0, repository: str = "a/a", age: float = 0.0, **fields):
    asked = {"resources": {"nodes": nodes, "accelerators_per_node": devices}}
    asked |= {"priority": priority, "repository": repository}
    return job(fields.pop("state", JobState.QUEUED), asked=asked, job_id=name, created=START - age, **fields)


def started(jobs, capacity=CAPACITY, **options):
    return [admitted.job_id for admitted in admit(jobs, capacity, **options)]


def test_all_devices_or_none():
    running = queued("r", 1, 8, state=JobState.RUNNING)
    assert started([running, queued("a", 2, 8)]) == []
    assert started([running, queued("a", 2, 4)]) == ["a"]


def test_priority_then_age_then_name():
    jobs = [queued("old", 1, 1, age=9), queued("b", 1, 1), queued("a", 1, 1), queued("high", 1, 1, priority=5)]
    assert started(jobs) == ["high", "old", "a", "b"]


def test_small_jobs_do_not_pass_a_big_one_that_waits():
    jobs = [queued("r", 1, 8, state=JobState.CLEANING), queued("big", 2, 8, age=9)]
    jobs += [queued(f"small-{index}", 1, 1) for index in range(5)]
    assert started(jobs) == []
    assert started([*jobs, queued("high", 1, 1, priority=1)]) == ["high"]
    assert started(jobs[1:]) == ["big"]


def test_a_repository_at_its_quota_waits_for_itself_and_blocks_nobody():
    jobs = [queued("r", 1, 4, state=JobState.PREFLIGHT), queued("a", 1, 1, age=9), queued("b", 1, 8, repository="b/b")]
    assert started(jobs, quota=4) == []
    assert started(jobs, quota=8) == ["a", "b"]
    assert started([jobs[0], queued("a", 1, 5, age=9), jobs[2]], quota=8) == ["b"]


def test_what_is_cancelled_or_can_never_start_blocks_nobody():
    jobs = [queued("c", 2, 8, age=9, cancel="x"), queued("n", 8, 1, age=8), queued("a", 1, 1)]
    assert started(jobs) == ["a"]


@pytest.mark.parametrize(
    ("asked", "quota", "said"),
    [
        ({"resources": {"nodes": 2, "accelerators_per_node": 8}}, None, None),
        ({"resources": {"nodes": 5}}, None, "5 nodes x 4 devices asked for, but a job here may have 4 nodes"),
        ({"resources": {"accelerators_per_node": 9}}, None, "but a node here has 8 devices"),
        ({"resources": {"nodes": 4, "accelerators_per_node": 8}}, None, "= 32, but there are 16 devices"),
        ({"resources": {"nodes": 2, "accelerators_per_node": 8}}, 8, "a/a may hold 8 devices at a time"),
        ({"worker_replicas": 4}, None, None),
        ({"worker_replicas": 5}, None, "5 nodes x 4 devices"),
    ],
)
def test_the_check_at_submit_says_what_can_never_start(asked, quota, said):
    found = never_fits(request(repository="a/a", **asked), CAPACITY, quota, devices_per_node=4)
    assert found is None if said is None else said in (found or "")


def test_what_a_request_leaves_out_comes_from_the_profile():
    def given(**fields):
        resources = resources_of(request(**fields), devices_per_node=4)
        return resources.nodes, resources.accelerators_per_node

    assert given() == (1, 4)
    assert given(worker_replicas=3) == (3, 4)
    assert given(worker_replicas=3, resources={"accelerators_per_node": 2}) == (3, 2)
    assert given(resources={"nodes": 2}) == (2, 4)


STATES = st.sampled_from([JobState.QUEUED, JobState.QUEUED, JobState.RUNNING, JobState.CLEANING, JobState.RETRYING])


@st.composite
def queues(draw):
    jobs = []
    for index in range(draw(st.integers(0, 12))):
        nodes, devices = draw(st.integers(1, 5)), draw(st.integers(1, 9))
        priority, repository = draw(st.integers(-1, 1)), draw(st.sampled_from(["a/a", "b/b"]))
        age, state = draw(st.integers(0, 3)), draw(STATES)
        jobs.append(queued(f"j{index}", nodes, devices, priority, repository, age, state=state))
    return jobs


@given(jobs=queues(), quota=st.none() | st.integers(1, 20))
def test_never_over_capacity_or_quota_and_never_out_of_order(jobs, quota):
    admitted = admit(jobs, CAPACITY, quota)
    held, by_repository = 0, Counter()
    for one in jobs:
        if one.state in HOLDS_DEVICES:
            held += one.request.resources.devices
            by_repository[one.request.repository] += one.request.resources.devices
    before = by_repository.copy()
    for one in admitted:
        assert one.state is JobState.QUEUED
        held += one.request.resources.devices
        by_repository[one.request.repository] += one.request.resources.devices
        assert held <= CAPACITY.devices
        assert quota is None or by_repository[one.request.repository] <= quota

    def order(one):
        return -one.request.priority, one.created, one.job_id

    assert admitted == sorted(admitted, key=order)
    left = [one for one in jobs if one.state is JobState.QUEUED and one not in admitted]
    for one in left:  # behind whoever could have started and did not, only its own quota or size excuses
        startable = never_fits(one.request, CAPACITY, quota) is None
        behind = [other for other in admitted if order(other) > order(one)]
        if startable and behind:
            assert quota is not None
            mine = before[one.request.repository] + sum(
                other.request.resources.devices
                for other in admitted
                if other.request.repository == one.request.repository and order(other) < order(one)
            )
            assert mine + one.request.resources.devices > quota


@given(jobs=queues())
def test_the_oldest_of_the_highest_that_fits_into_what_is_free_starts(jobs):
    waiting = [one for one in jobs if one.state is JobState.QUEUED and never_fits(one.request, CAPACITY) is None]
    free = CAPACITY.devices - sum(one.request.resources.devices for one in jobs if one.state in HOLDS_DEVICES)
    if waiting:
        head = min(waiting, key=lambda one: (-one.request.priority, one.created, one.job_id))
        assert (head in admit(jobs, CAPACITY)) == (head.request.resources.devices <= free)
