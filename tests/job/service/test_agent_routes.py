"""What agents send: batches of lines, heartbeats, the end."""

from __future__ import annotations

import pytest

from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.states import Status


def chunk(start, lines, **fields):
    size = sum(len(line) + 1 for line in lines)
    offsets = [start + sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    place = {"source": "driver", "node": None, "rank": None}
    return {**place, "start": start, "end": start + size, "lines": lines, "offsets": offsets, **fields}


def post(service, job_id, *chunks, attempt=1):
    return service.agent("POST", job_id, "logs", {"attempt": attempt, "chunks": list(chunks)})


@pytest.fixture
def job_id(service):
    job_id = service.submit()
    service.run(job_id)
    return job_id


def lines(service, job_id):
    return service.http.get(f"/api/v1/rayjobs/{job_id}/logs").text.splitlines()


def test_lines_are_stored_once(service, job_id):
    one, two = chunk(0, ["a", "b"]), chunk(4, ["c"])
    assert post(service, job_id, one).json() == {"watermarks": {"driver": 4}}
    assert post(service, job_id, one).status_code == 200
    assert post(service, job_id, one, two).json() == {"watermarks": {"driver": 6}}
    assert lines(service, job_id) == ["a", "b", "c"]
    assert service.agent("GET", job_id, "watermarks?attempt=1").json() == {"watermarks": {"driver": 6}}


def test_a_chunk_that_does_not_fit_brings_the_watermarks_and_stores_nothing(service, job_id):
    post(service, job_id, chunk(0, ["a"]))
    good = chunk(0, ["r"], source="node-0/rank-0", node=0, rank=0)
    answer = post(service, job_id, good, chunk(10, ["z"]))
    assert answer.status_code == 409
    assert answer.json()["watermarks"]["driver"] == 2
    assert lines(service, job_id) == ["a"]


@pytest.mark.parametrize(
    "bad",
    [
        chunk(5, ["a"], end=0),
        chunk(0, ["a", "b"], offsets=[0]),
        chunk(0, ["a"], offsets=[99]),
        chunk(0, ["a\nb"]),
        chunk(0, ["x" * 300_000]),
        chunk(0, ["a"], rank=0),
        chunk(0, ["a"], source="node-0/rank-0"),
        chunk(0, ["a"], source="../../etc/passwd", rank=0),
        chunk(0, ["a"], end=10**30),
        chunk(0, ["a"]) | {"lines": "a"},
    ],
)
def test_a_chunk_that_makes_no_sense(service, job_id, bad):
    answer = post(service, job_id, bad)
    assert answer.status_code == 422
    assert answer.json().keys() == {"error"}
    assert lines(service, job_id) == []


def test_a_batch_over_4_mib(service, job_id):
    answer = post(service, job_id, chunk(0, ["x" * 200_000] * 25))
    assert answer.status_code == 413


def test_another_attempt_and_a_job_that_is_over_are_gone(service, job_id):
    assert post(service, job_id, chunk(0, ["a"]), attempt=2).status_code == 410
    service.end(job_id, Status.SUCCEEDED)
    assert post(service, job_id, chunk(0, ["late"])).status_code == 410
    assert service.events(job_id)[-1]["type"] == "final"


def test_an_unknown_job(service):
    assert post(service, "rj-000000000000", chunk(0, ["a"])).status_code == 404
    assert post(service, "nonsense", chunk(0, ["a"])).status_code == 401


def test_heartbeat_and_end_reach_the_runner(service, job_id):
    heard = Heartbeat(attempt=1, phase="running", output_bytes=3)
    answer = service.agent("POST", job_id, "heartbeat", heard.model_dump())
    assert answer.json() == {"stop": False, "grace": 3.0}
    assert service.runner.heard[-1] == heard
    record = EndRecord(job_id=job_id, attempt=1, exit_code=3, started=1.0, ended=2.0).sealed()
    assert service.agent("POST", job_id, "end", record.model_dump()).status_code == 204
    assert service.runner.ended[-1] == record


def test_half_an_end_record_is_none(service, job_id):
    record = EndRecord(job_id=job_id, attempt=1, exit_code=0, started=1.0, ended=2.0).sealed()
    before = len(service.runner.ended)
    for change in ({"exit_code": 1}, {"digest": ""}, {"job_id": "rj-000000000000"}):
        assert service.agent("POST", job_id, "end", record.model_dump() | change).status_code == 422
    assert len(service.runner.ended) == before


SHM = {"check": "shm", "ok": False, "expected": "64 MiB free", "found": "1 MiB", "fix": "more", "node": 1}


def report(service, job_id, *findings, **fields):
    body = {"attempt": 1, "seconds": 1.5, "checks": 30, "failed": len(findings), "findings": findings, **fields}
    return service.agent("POST", job_id, "preflight", body)


def test_the_first_report_of_an_attempt_is_an_event(service, job_id):
    assert report(service, job_id, SHM).status_code == 204
    assert report(service, job_id, SHM).status_code == 204
    assert report(service, job_id, attempt=2).status_code == 410
    service.end(job_id, Status.FAILED, failure_class="infra")
    (event,) = [event for event in service.events(job_id) if event["type"] == "preflight"]
    assert event["message"] == "1 of 30 checks failed: shm on node-1: expected 64 MiB free, found 1 MiB; more"
    assert (event["ok"], event["attempt"], event["checks"], event["failed"]) == (False, 1, 30, 1)
    assert event["findings"][0]["node"] == 1


def test_nothing_is_reported_of_a_job_that_is_over(service, job_id):
    service.end(job_id, Status.SUCCEEDED)
    assert report(service, job_id, SHM).status_code == 410


@pytest.mark.parametrize(
    "bad",
    [
        {"seconds": -1.0},
        {"findings": [SHM] * 21},
        {"findings": [SHM | {"ok": True}]},
        {"findings": [SHM | {"kind": "user"}]},
        {"findings": [SHM | {"node": "one"}]},
        {"findings": [{"check": "shm"}]},
        {"more": 1},
    ],
)
def test_a_report_that_is_none(service, job_id, bad):
    assert report(service, job_id, **bad).status_code == 422


def test_a_number_that_json_does_not_have_is_no_report(service, job_id):
    text = '{"attempt":1,"seconds":1,"checks":1,"failed":1,"findings":[%s]}'
    one = '{"check":"a","ok":false,"expected":"b","found":"c","value":Infinity}'
    assert service.agent("POST", job_id, "preflight", content=text % one).status_code == 422
