"""Jobs in the store: created once, moved by whoever decided on what is true, ended once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from corral.errors import ConfigError
from corral.job.core.clock import Clock
from corral.job.protocol.states import FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict
from corral.job.store.store import Ended, KeyConflict, Stale, Store, UnknownJob
from tests.job.store.jobs import JOB, batch, chunk, finish, is_gap_free, new_job, read_all, request, run


def test_the_same_key_and_content_is_the_same_job_and_other_content_is_refused(store, reopen):
    first, created = store.create(request(args=["a=1"]), key="k", owner="ann", job_id=JOB)
    again, anew = store.create(request(args=["a=1"]), key="k", owner="ann", job_id=JOB)
    assert (created, anew) == (True, False)
    assert first == again == reopen().get(JOB)


def test_a_taken_key_or_id_names_its_job(store):
    store.create(request(), key="k", owner="ann", job_id=JOB)
    with pytest.raises(KeyConflict) as conflict:
        store.create(request(args=["other"]), key="k", owner="ann", job_id=JOB)
    assert conflict.value.job_id == JOB
    with pytest.raises(KeyConflict):
        store.create(request(), key="other", owner="ann", job_id=JOB)
    _, created = store.create(request(), key="k", owner="bob", job_id="rj-000000000002")
    assert created, "keys of two owners never meet"


def test_a_new_job_tells_accepted_and_queued(store):
    job = new_job(store)
    told = read_all(store)
    assert [(event["seq"], event["type"], event["status"]) for event in told] == [
        (1, "status", "ACCEPTED"),
        (2, "status", "QUEUED"),
    ]
    assert (job.state, job.last_seq, job.attempt) == (JobState.QUEUED, 2, 1)
    assert {"message", "rayjob_status", "job_deployment_status", "ts", "attempt"} <= told[0].keys()


def test_the_end_is_a_status_and_one_final_and_nothing_follows(store, reopen):
    job = run(store, new_job(store))
    verdict = Verdict(
        status=Status.FAILED, failure_class=FailureClass.USER, cause="exit_code", message="exit code 3", exit_code=3,
        failing_rank=5, failing_node=1, first_error="KeyError: 'löss' \x00\x85\u2028", rule="exit_code", evidence="e",
    )  # fmt: skip
    job = store.transition(job, JobState.COLLECTING, message="ended", verdict=verdict)
    job = store.transition(job, JobState.CLEANING, message="stored")
    job = store.transition(
        job, JobState.FAILED, message="over", rayjob_status="FAILED", job_deployment_status="Complete"
    )
    assert job.terminal
    assert job.finished is not None
    store = reopen()
    assert store.get(JOB) == job
    *_, status, final = told = read_all(store)
    assert is_gap_free(told)
    assert [event["type"] for event in told].count("final") == 1
    assert (status["status"], status["rayjob_status"], status["job_deployment_status"]) == (
        "FAILED",
        "FAILED",
        "Complete",
    )
    assert final.items() >= {
        "type": "final", "status": "FAILED", "class": "user", "cause": "exit_code", "exit_code": 3, "failing_rank": 5,
        "failing_node": 1, "first_error": "KeyError: 'löss' \x00\x85\u2028", "message": "exit code 3",
    }.items()  # fmt: skip
    with pytest.raises(Ended):
        store.append(JOB, "warning", {"message": "late"}, 1)
    with pytest.raises(Ended):
        store.append_logs(JOB, batch(chunk("driver", 0, ["late"])))
    with pytest.raises((Stale, ValueError)):
        store.transition(job, JobState.CLEANING, message="again")
    assert read_all(store) == told


def test_an_end_without_its_verdict_or_against_the_machine_is_a_bug(store):
    job = new_job(store)
    with pytest.raises(ValueError, match="not followed by"):
        store.transition(job, JobState.RUNNING, message="too far")
    with pytest.raises(ValueError, match="verdict"):
        store.transition(job, JobState.CANCELLED, message="no verdict")
    timeout = Verdict(status=Status.TIMEOUT, cause="queue", message="queued too long")
    with pytest.raises(ValueError, match="verdict"):
        store.transition(job, JobState.CANCELLED, message="another one", verdict=timeout)
    with pytest.raises(TypeError, match="owner"):
        store.transition(job, JobState.PROVISIONING, message="m", owner="eve")
    assert store.get(JOB) == job
    assert len(read_all(store)) == 2


def test_of_two_who_decide_at_once_one_is_told_that_it_is_stale(store):
    job = new_job(store)
    start = threading.Barrier(2)
    outcomes: list[str] = []

    def move() -> None:
        start.wait()
        try:
            store.transition(job, JobState.PROVISIONING, message="admitted", admitted=1.0)
            outcomes.append("moved")
        except Stale:
            outcomes.append("stale")

    threads = [threading.Thread(target=move) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["moved", "stale"]
    assert [event["status"] for event in read_all(store)] == ["ACCEPTED", "QUEUED", "PROVISIONING"]


def test_a_new_attempt_starts_without_what_the_old_one_had(store, reopen):
    job = run(store, new_job(store, retry={"infra": 1}))
    lost = Verdict(status=Status.FAILED, failure_class=FailureClass.INFRA, cause="agent_lost", message="lost")
    job = store.transition(job, JobState.COLLECTING, message="lost", verdict=lost)
    job = store.transition(job, JobState.CLEANING, message="stored")
    job = store.transition(job, JobState.RETRYING, message="again")
    fresh = {"attempt": 2, "verdict": None, "admitted": None, "running": None}
    job = store.transition(job, JobState.QUEUED, message="waits", **fresh)
    assert (job.attempt, job.verdict, job.submission_id) == (2, None, f"{JOB}-a2")
    assert reopen().get(JOB) == job
    assert read_all(reopen())[-1]["attempt"] == 2


def test_the_first_cause_of_a_cancel_stays_and_makes_no_decision_stale(store):
    job = new_job(store)
    assert store.request_cancel(JOB, "cancelled_by_user").cancel == "cancelled_by_user"
    assert store.request_cancel(JOB, "cleaned_up").cancel == "cancelled_by_user"
    moved = store.transition(job, JobState.PROVISIONING, message="was decided before")
    assert moved.cancel == "cancelled_by_user"
    over = finish(store, new_job(store, "rj-000000000002"))
    assert store.request_cancel("rj-000000000002", "late") == over


def test_a_lease_is_renewed_only_where_one_was_asked_for(url, data_dir):
    now = [1000.0]
    store = Store(url, data_dir, Clock(wall=lambda: 0.0, monotonic=lambda: now[0]))
    start = store.create(request(lease=60), key="a", owner="ann", job_id=JOB)[0]
    store.create(request(), key="b", owner="ann", job_id="rj-000000000002")
    now[0] += 30
    assert start.lease_until == start.created + 60
    assert store.renew_lease(JOB).lease_until == start.created + 90
    assert store.renew_lease("rj-000000000002").lease_until is None
    store.close()


def test_jobs_are_listed_newest_first_in_pages_and_by_what_they_are(store):
    for n in range(7):
        fields = {"labels": {"suite": f"s {n % 2}"}, "github_run_id": str(n // 2), "github_run_attempt": 1 + n % 2}
        new_job(store, f"rj-00000000000{n}", repository=f"org/r{n % 3}", **fields)
    finish(store, store.get("rj-000000000003"))

    def listed(**wanted: object) -> list[int]:
        return [int(job.job_id[-1]) for job in store.jobs(**wanted)]

    assert listed() == [6, 5, 4, 3, 2, 1, 0]
    assert listed(limit=3) == [6, 5, 4]
    assert listed(limit=3, after="rj-000000000004") == [3, 2, 1]
    assert listed(after="rj-000000000000") == []
    assert listed(repository="org/r1") == [4, 1]
    assert listed(run_id="1") == [3, 2]
    assert listed(run_id="1", run_attempt=2) == [3]
    assert listed(state=JobState.SUCCEEDED) == [3]
    assert listed(label="suite=s 1") == [5, 3, 1]
    assert listed(label="suite", limit=2) == [6, 5]
    assert listed(label="other") == listed(label="suite=s") == listed(owner="bob") == []
    assert [int(job.job_id[-1]) for job in store.active()] == [0, 1, 2, 4, 5, 6]
    with pytest.raises(ConfigError, match="names no job"):
        store.jobs(after="rj-ffffffffffff")


def test_unknown_jobs_are_said_by_name(store):
    assert store.get(JOB) is None
    unknown = replace(new_job(store, "rj-000000000002"), job_id=JOB)
    for call in (
        lambda: store.append(JOB, "phase", {}, 1),
        lambda: store.append_logs(JOB, batch(chunk("driver", 0, ["x"]))),
        lambda: store.read(JOB, 0, types=frozenset({"log"})),
        lambda: store.watermarks(JOB, 1),
        lambda: store.request_cancel(JOB, "c"),
        lambda: store.renew_lease(JOB),
        lambda: store.remove(JOB),
        lambda: store.transition(unknown, JobState.PROVISIONING, message="m"),
    ):
        with pytest.raises(UnknownJob, match=JOB):
            call()


def test_a_job_that_is_over_can_be_removed_with_all_it_stored(store, data_dir, reopen):
    job = new_job(store, labels={"a": "b"})
    store.append_logs(JOB, batch(chunk("driver", 0, ["one", "two"])))
    with pytest.raises(ValueError, match="only a job that is over"):
        store.remove(JOB)
    finish(store, job)
    store.remove(JOB)
    assert store.get(JOB) is None
    assert not (data_dir / "jobs" / JOB).exists()
    assert store.jobs(label="a") == []
    store = reopen()
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["three"])))
    assert [event.get("line") for event in read_all(store)] == [None, None, "three"]
