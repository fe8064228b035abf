"""Each limit strikes at its second, says its numbers and names what raises it; clocks that jump cannot fool it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.job.backends.base import Observation, Presence
from corral.job.core.clock import Clock, elapsed
from corral.job.core.deadlines import HEARING_SECONDS, expired
from corral.job.core.facts import Facts
from corral.job.protocol.states import JobState, Status
from corral.job.protocol.verdict import client_exit_code
from tests.job.core.cases import START, heartbeat, job

NONE = {"queue": None, "start": None, "run": None, "idle": None, "hang": None}
HEARD = Facts(heard=heartbeat(progress=7), heard_at=START)


def limited(state: JobState, facts: Facts = HEARD, **timeouts):
    record = job(state, asked={"timeouts": NONE | timeouts}, admitted=START, running=START)
    return lambda seconds: expired(record, facts, START + seconds)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (JobState.QUEUED, "queue"),
        (JobState.PROVISIONING, "start"),
        (JobState.PREFLIGHT, "start"),
        (JobState.RUNNING, "run"),
        (JobState.RUNNING, "idle"),
        (JobState.RUNNING, "hang"),
    ],
)
def test_each_limit_strikes_at_its_second_and_only_in_its_states(state, kind):
    at = limited(state, **{kind: 30.0})
    assert at(29.9) is None
    passed = at(30.0)
    assert passed is not None
    assert (passed.kind, passed.limit, passed.waited) == (kind, 30.0, 30.0)
    assert "30.0 s (limit 30 s)" in passed.said
    assert f"raise timeouts.{kind} (--timeout-{kind})" in passed.said
    verdict = passed.verdict
    assert (verdict.status, verdict.cause, client_exit_code(verdict)) == (Status.TIMEOUT, kind, 124)
    assert verdict.message.startswith(f"TIMEOUT ({kind}): ")
    others = {other: 1.0 for other in NONE if other != kind}
    silent = limited(state, **others)(1e6)
    assert silent is None or silent.kind != kind


def test_without_limits_nothing_ever_strikes():
    for state in JobState:
        if state not in (JobState.COLLECTING, JobState.CLEANING):
            assert limited(state)(1e9) is None


def test_start_covers_provisioning_and_preflight_together_and_quotes_the_backend():
    waiting = Facts(observation=Observation(Presence.STARTING, "node-1 waits for 4 NPU"))
    record = job(JobState.PREFLIGHT, asked={"timeouts": NONE | {"start": 30}}, admitted=START, state_since=START + 25)
    passed = expired(record, waiting, START + 30)
    assert passed is not None
    assert "still in PREFLIGHT, last seen: node-1 waits for 4 NPU" in passed.said


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (JobState.PROVISIONING, "still in PROVISIONING, last seen: the API server does not answer; raise"),
        (JobState.CLEANING, "(the API server does not answer); the reaper goes on"),
    ],
)
def test_a_backend_that_does_not_answer_is_quoted(state, said):
    """Its last answer, from when all was well, says nothing of why it takes so long."""
    facts = Facts(observation=Observation(Presence.STARTING), trouble="the API server does not answer")
    passed = expired(job(state, asked={"timeouts": NONE | {"start": 30}}), facts, START + 1e6)
    assert passed is not None
    assert said in passed.said


def test_the_one_that_passed_first_is_told():
    at = limited(
        JobState.RUNNING, replace(HEARD, output_at=START + 50, progress_at=START + 5), run=60, idle=20, hang=30
    )
    passed = at(1000)
    assert passed is not None
    assert passed.kind == "hang"  # at 35, before run at 60 and idle at 70


def test_output_and_progress_push_their_limits_on():
    for kind, moved in (("idle", {"output_at": START + 20}), ("hang", {"progress_at": START + 20})):
        at = limited(JobState.RUNNING, replace(HEARD, **moved), **{kind: 30})
        assert at(49.9) is None
        assert at(50) is not None


def test_a_command_without_a_counter_cannot_hang():
    assert limited(JobState.RUNNING, Facts(heard=heartbeat(), heard_at=START), hang=1)(1e6) is None
    assert limited(JobState.RUNNING, Facts(heard=heartbeat(progress=7, attempt=2)), hang=1)(1e6) is None


def rank(number: int, calls: int, method: str = "update"):
    return {"rank": number, "node": number // 4, "calls": calls, "state": "running", "method": method, "time": START}


@pytest.mark.parametrize(
    ("fields", "place", "said"),
    [
        ({"suspects": ["node-1 rank 5 (pid 7) is stopped"]}, (5, 1), "suspected: node-1 rank 5 (pid 7) is stopped"),
        (
            {"ranks": [rank(0, 9), rank(5, 8, "log_probs"), rank(6, 9)]},
            (5, 1),
            "behind all others in log_probs (call 8",
        ),
        ({"ranks": [rank(0, 9), rank(5, 9)]}, (None, None), "no progress counter of any rank moved"),
        ({"ranks": [rank(0, 8), rank(5, 8), rank(6, 9)]}, (None, None), "no progress counter of any rank moved"),
        ({"ranks": [rank(0, 8)]}, (None, None), "no progress counter of any rank moved"),
    ],
)
def test_a_hang_names_the_rank_that_holds_the_others_up(fields, place, said):
    passed = limited(JobState.RUNNING, Facts(heard=heartbeat(progress=7, **fields), heard_at=START + 59), hang=60)(60)
    assert passed is not None
    assert (passed.verdict.failing_rank, passed.verdict.failing_node) == place
    assert said in passed.said
    assert passed.verdict.message.startswith("TIMEOUT (hang): rank 5 on node-1: " if place[0] else "TIMEOUT (hang): no")


def test_an_agent_that_is_silent_too_is_worth_a_word():
    passed = limited(JobState.RUNNING, idle=60)(60)
    assert passed is not None
    assert "its agent was last heard 60 s ago" in passed.said


class TestRestart:
    """A service that comes back knows nothing yet of what agents did meanwhile."""

    def test_agents_are_heard_before_a_limit_strikes(self):
        back = replace(HEARD, heard=None, heard_at=None, service_started=START + 1000)
        at = limited(JobState.RUNNING, back, run=60)
        assert at(1000 + HEARING_SECONDS - 1) is None
        assert at(1000 + HEARING_SECONDS) is not None

    def test_idle_and_hang_count_anew(self):
        back = replace(HEARD, service_started=START + 1000)
        for kind in ("idle", "hang"):
            assert limited(JobState.RUNNING, back, **{kind: 60})(1059) is None
            assert limited(JobState.RUNNING, back, **{kind: 60})(1060) is not None

    def test_collecting_and_cleaning_get_their_time_again(self):
        for state in (JobState.COLLECTING, JobState.CLEANING):
            assert limited(state, Facts(service_started=START + 1000))(1119) is None
            assert limited(state, Facts(service_started=START + 1000))(1120) is not None

    def test_a_start_before_the_job_does_not_hold_a_limit_back(self):
        assert limited(JobState.RUNNING, replace(HEARD, service_started=START - 5), run=1)(1) is not None


@given(state=st.sampled_from(JobState), jump=st.floats(1, 1e9), known=st.booleans())
def test_a_clock_that_went_back_makes_no_limit_strike_early(state, jump, known):
    started = START - jump if known else None
    record = job(state, admitted=START, running=START)
    passed = expired(record, replace(HEARD, service_started=started), START - jump)
    assert passed is None


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING])
def test_moments_in_the_far_future_delay_a_limit_and_never_disable_it(state):
    ahead = START + 3e7
    asked = {"timeouts": NONE | {"queue": 60, "start": 60, "run": 60}}
    record = job(state, asked=asked, state_since=ahead, admitted=ahead, running=ahead)
    facts = Facts(service_started=START)
    assert expired(record, facts, START + 59) is None
    assert expired(record, facts, START + 60) is not None


def test_the_clock_follows_the_monotonic_one_only():
    wall, steady = [START], [5.0]
    clock = Clock(lambda: wall[0], lambda: steady[0])
    assert clock.now() == START
    wall[0] -= 86_400
    steady[0] += 2
    assert clock.now() == START + 2
    steady[0] -= 1  # broken hardware, moved machines
    assert clock.now() == START + 2
    assert abs(Clock().now() - Clock().now()) < 60


@pytest.mark.parametrize(("since", "span"), [(None, 0.0), (START + 5, 0.0), (START - 5, 5.0)])
def test_elapsed_is_never_negative(since, span):
    assert elapsed(since, START) == span
