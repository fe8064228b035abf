"""Single decisions: who wins when several things are true at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corral.job.backends.base import Observation, Presence
from corral.job.core.classify import classify
from corral.job.core.decide import LOST_GRACE, Decision, Facts, decide
from corral.job.core.machine import ALLOWED, DEADLINES, allowed
from corral.job.protocol.states import TERMINAL, FailureClass, JobState, Status
from tests.job.core.cases import START, end, heartbeat, job

HELD = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)
WAITING = (JobState.ACCEPTED, JobState.QUEUED)
INFRA = classify(end(75, "error: the disk is gone"))


def test_every_state_has_its_row():
    assert set(ALLOWED) == set(DEADLINES) == set(JobState)
    assert all(not ALLOWED[state] for state in TERMINAL)
    assert not allowed(JobState.QUEUED, JobState.RUNNING)
    assert allowed(JobState.QUEUED, JobState.PROVISIONING)


@pytest.mark.parametrize("state", HELD)
def test_a_whole_end_record_wins_over_all_that_is_true_beside_it(state):
    facts = Facts(end=end(0), ended_seen_at=START, refused="no", observation=Observation(Presence.ABSENT))
    running = job(state, cancel="cancelled_by_user", lease_until=START, admitted=START, running=START)
    decision = decide(running, facts, START + 1e6)
    assert decision is not None
    assert decision.to is JobState.COLLECTING
    assert decision.verdict is not None
    assert decision.verdict.status is Status.SUCCEEDED


@pytest.mark.parametrize(
    "record",
    [
        end(0, attempt=2),
        end(0).model_copy(update={"job_id": "rj-000000000000"}).sealed(),
        end(0).model_copy(update={"exit_code": 3}),
    ],
    ids=["attempt", "job", "digest"],
)
def test_half_a_record_or_that_of_another_is_none(record):
    assert decide(job(JobState.RUNNING, running=START), Facts(end=record), START) is None


@pytest.mark.parametrize("state", HELD + WAITING)
def test_cancel_in_every_state_before_a_verdict(state):
    decision = decide(job(state, cancel="cancelled_by_user"), Facts(), START)
    assert decision is not None
    assert decision.to is (JobState.CANCELLED if state in WAITING else JobState.COLLECTING)
    assert decision.verdict is not None
    assert (decision.verdict.status, decision.verdict.cause) == (Status.CANCELLED, "cancelled_by_user")


def test_a_cancel_after_the_verdict_changes_nothing_but_the_retry():
    asked = {"retry": {"infra": 2}}
    cleaning = job(JobState.CLEANING, asked=asked, verdict=INFRA)
    facts = Facts(absent=True)
    again, ended = decide(cleaning, facts, START), decide(replace(cleaning, cancel="by_user"), facts, START)
    assert again is not None
    assert again.to is JobState.RETRYING
    assert ended == Decision(JobState.FAILED, INFRA.message)
    collecting = job(JobState.COLLECTING, verdict=INFRA, cancel="by_user")
    assert decide(collecting, Facts(logs_complete=True), START) == Decision(JobState.CLEANING, "all logs are stored")


@pytest.mark.parametrize("presence", [Presence.ABSENT, Presence.ENDED])
def test_an_agent_that_is_heard_refutes_hearsay_for_15_seconds(presence):
    running = job(JobState.RUNNING, running=START)
    facts = Facts(
        observation=Observation(presence, "Ray says so", hearsay=True),
        ended_seen_at=START,
        heard=heartbeat("running"),
        heard_at=START + 100,
    )
    assert decide(running, facts, START + 114.9) is None
    assert decide(running, facts, START + 115) is not None
    assert decide(running, replace(facts, heard=None, heard_at=None), START + LOST_GRACE) is not None
    earlier = replace(facts, heard=heartbeat("running", attempt=2))
    assert decide(running, earlier, START + 101) is not None
    sure = replace(facts, observation=Observation(presence, "its process is gone"))
    assert decide(running, sure, START + 101) is not None


@pytest.mark.parametrize("state", HELD)
def test_a_lost_agent_is_told_after_the_grace_and_not_before(state):
    lost = job(state, running=START)
    facts = Facts(observation=Observation(Presence.ABSENT, "process 7 is gone"), ended_seen_at=START)
    assert decide(lost, replace(facts, heard=None), START + LOST_GRACE - 0.01) is None
    decision = decide(lost, facts, START + LOST_GRACE)
    assert decision is not None
    assert decision.verdict is not None
    assert (decision.verdict.failure_class, decision.verdict.cause) == (FailureClass.INFRA, "agent_lost")


@pytest.mark.parametrize("state", HELD)
def test_silence_and_what_a_backend_says_once_decide_nothing(state):
    silent = Facts(observation=Observation(Presence.ABSENT), heard=heartbeat("preflight"), heard_at=START - 500)
    decision = decide(job(state, running=START), silent, START + 1)
    assert decision is None or decision.verdict is None


def test_the_agent_leads_through_the_states():
    provisioning = job(JobState.PROVISIONING)
    assert decide(provisioning, Facts(), START) is None
    assert decide(provisioning, Facts(heard=heartbeat("running", attempt=2)), START) is None
    decision = decide(provisioning, Facts(heard=heartbeat("collecting")), START)
    assert decision is not None
    assert (decision.to, decision.verdict) == (JobState.PREFLIGHT, None)
    preflight = job(JobState.PREFLIGHT)
    assert decide(preflight, Facts(heard=heartbeat("preflight")), START) is None
    decision = decide(preflight, Facts(heard=heartbeat("collecting")), START)
    assert decision is not None
    assert decision.to is JobState.RUNNING
    assert decision.changes(preflight, 5.0) == {"running": 5.0}


def test_a_refusal_is_a_config_failure():
    decision = decide(job(JobState.PROVISIONING), Facts(refused="no NPU here"), START)
    assert decision is not None
    assert decision.to is JobState.COLLECTING
    assert decision.verdict is not None
    assert decision.verdict.failure_class is FailureClass.CONFIG


def test_logs_that_never_come_are_a_warning_after_120_s():
    collecting = job(JobState.COLLECTING, verdict=INFRA)
    assert decide(collecting, Facts(), START + 119) is None
    decision = decide(collecting, Facts(), START + 120)
    assert decision is not None
    assert (decision.to, decision.verdict) == (JobState.CLEANING, None)
    assert decision.warning is not None
    assert "limit 120 s" in decision.warning


def test_nodes_that_stay_are_left_to_the_reaper_and_not_tried_again():
    cleaning = job(JobState.CLEANING, asked={"retry": {"infra": 2}}, verdict=INFRA)
    assert decide(cleaning, Facts(), START + 119) is None
    decision = decide(cleaning, Facts(), START + 120)
    assert decision is not None
    assert decision.to is JobState.FAILED
    assert decision.warning is not None
    assert "reaper" in decision.warning
    assert "not tried again" in decision.warning


@pytest.mark.parametrize(
    ("verdict", "attempt", "tried"),
    [
        (INFRA, 1, True),
        (INFRA, 2, True),
        (INFRA, 3, False),
        (classify(end(3)), 1, False),
        (classify(end(78)), 1, False),
        (classify(end(124)), 1, False),
        (classify(end(0)), 1, False),
    ],
)
def test_only_infra_is_tried_again_and_only_so_often(verdict, attempt, tried):
    cleaning = job(JobState.CLEANING, asked={"retry": {"infra": 2}}, verdict=verdict, attempt=attempt)
    decision = decide(cleaning, Facts(absent=True), START)
    assert decision is not None
    assert (decision.to is JobState.RETRYING) == tried
    assert tried or decision.to == verdict.status


def test_a_cancel_while_retrying_waits_for_the_new_attempt_and_leaves_the_old_verdict():
    asked = {"retry": {"infra": 2}}
    retrying = job(JobState.RETRYING, asked=asked, verdict=INFRA, cancel="by_user", state_since=START - 1e6)
    decision = decide(retrying, Facts(), START)
    assert decision is not None
    assert decision.to is JobState.QUEUED
    again = replace(retrying, state=decision.to, **decision.changes(retrying, START))
    ended = decide(again, Facts(), START)
    assert ended is not None
    assert (ended.to, again.attempt, again.verdict) == (JobState.CANCELLED, 2, None)


def test_a_new_attempt_starts_clean():
    retrying = job(JobState.RETRYING, asked={"retry": {"infra": 2}}, verdict=INFRA, admitted=START, running=START)
    decision = decide(retrying, Facts(), START)
    assert decision is not None
    assert (decision.to, decision.message) == (JobState.QUEUED, "attempt 2 of 3 waits for its devices")
    assert decision.changes(retrying, START) == {"attempt": 2, "verdict": None, "admitted": None, "running": None}


class TestLease:
    ASKED = {"lease": 60.0}  # noqa: RUF012

    def at(self, now: float, **fields):
        started = fields.pop("service_started", None)
        running = job(JobState.RUNNING, asked=self.ASKED, running=START, **{"lease_until": START + 60} | fields)
        return decide(running, Facts(service_started=started), now)

    def test_it_ends_the_job(self):
        assert self.at(START + 59) is None
        decision = self.at(START + 60)
        assert decision is not None
        assert decision.verdict is not None
        assert (decision.verdict.status, decision.verdict.cause) == (Status.CANCELLED, "lease")
        assert "60 s" in decision.verdict.message

    def test_without_one_the_job_goes_on(self):
        assert self.at(START + 3600, lease_until=None) is None

    def test_a_service_that_was_down_gives_clients_a_whole_lease(self):
        assert self.at(START + 1059, service_started=START + 1000) is None
        assert self.at(START + 1060, service_started=START + 1000) is not None

    def test_a_lease_written_by_a_clock_that_was_ahead_still_ends(self):
        assert self.at(START + 59, lease_until=START + 1e6, service_started=START) is None
        assert self.at(START + 60, lease_until=START + 1e6, service_started=START) is not None

    def test_no_retry_after_it(self):
        cleaning = job(JobState.CLEANING, asked=self.ASKED | {"retry": {"infra": 2}}, verdict=INFRA, lease_until=START)
        assert decide(cleaning, Facts(absent=True), START) == Decision(JobState.FAILED, INFRA.message)
