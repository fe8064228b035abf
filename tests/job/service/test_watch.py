"""The live stream, as the first protocol and as ours; logs and events."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

import pytest

from corral.job.protocol.states import JobState, Status
from corral.job.service.settings import Limits
from tests.job.service.running import failure, running, until


def finished(service, status=Status.SUCCEEDED, **fields):
    job_id = service.submit()
    service.run(job_id)
    service.lines(job_id, ["one", "two ☃"])
    service.lines(job_id, ["r0"], "node-0/rank-0", 0)
    service.lines(job_id, ["r1"], "node-0/rank-1", 1)
    service.end(job_id, status, **fields)
    return job_id


def test_all_events_have_gap_free_numbers_and_final_is_last(service):
    job_id = finished(service)
    events = service.events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events].count("final") == 1
    assert events[-1]["type"] == "final"
    assert events[-1]["status"] == "SUCCEEDED"
    assert [event["line"] for event in events if event["type"] == "log"] == ["one", "two ☃", "r0", "r1"]


@pytest.mark.parametrize("cut", range(0, 14, 3))
def test_a_cursor_goes_on_where_it_was(service, cut):
    job_id = finished(service)
    whole = service.events(job_id)
    assert service.events(job_id, after_seq=cut) == whole[cut:]


def test_ranks_and_types(service):
    job_id = finished(service)
    chosen = service.events(job_id, types="log", ranks="1")
    assert [(event["type"], event.get("line")) for event in chosen] == [("log", "r1"), ("final", None)]
    assert {event["type"] for event in service.events(job_id, types="status")} == {"status", "final"}


def test_the_first_protocol_has_four_types_and_no_cancelled(service):
    job_id = service.submit()
    service.write(service.store.append, job_id, "warning", {"message": "new"}, 1)
    service.run(job_id)
    service.end(job_id, Status.CANCELLED, cause="cancelled_by_user")
    text = service.http.get(f"/api/v1/rayjobs/{job_id}/watch", params={"format": "ndjson"}).text
    events = [json.loads(line) for line in text.splitlines()]
    assert {event["type"] for event in events} <= {"log", "status", "error", "final"}
    assert events[-1]["status"] == "FAILED"
    assert service.events(job_id)[-1]["status"] == "CANCELLED"


@pytest.mark.parametrize("job_id", ["rj-000000000000", "nonsense", "%00", "a%20b", "%ff"])
def test_a_job_nobody_knows(service, job_id):
    old = service.http.get(f"/api/v1/rayjobs/{job_id}/watch?format=ndjson")
    assert old.status_code == 200
    assert [json.loads(line)["type"] for line in old.text.splitlines()] == ["error", "final"]
    assert json.loads(old.text.splitlines()[-1])["status"] == "NOT_FOUND"
    assert service.http.get(f"/api/v1/rayjobs/{job_id}/watch?types=all").status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        "types=logs",
        "ranks=a",
        "ranks=-1",
        "after_seq=-1",
        "after_seq=9999",
        "after_seq=99999999999999999999",
        "format=xml",
    ],
)
def test_a_watch_that_makes_no_sense(service, query):
    job_id = finished(service)
    answer = service.http.get(f"/api/v1/rayjobs/{job_id}/watch?{query}")
    assert answer.status_code == 422
    assert answer.json().keys() == {"error"}


def test_server_sent_events_resume_and_end(service):
    job_id = finished(service)
    url = f"/api/v1/rayjobs/{job_id}/watch?format=sse&types=all"
    text = service.http.get(url).text
    frames = [frame.splitlines() for frame in text.split("\n\n") if frame]
    assert [frame[0] for frame in frames] == [f"id: {n}" for n in range(1, len(frames) + 1)]
    assert json.loads(frames[-1][2].removeprefix("data: "))["type"] == "final"
    rest = service.http.get(url, headers={"Last-Event-ID": "3"}).text
    assert rest == text[text.index("id: 4\n") :]
    over = service.http.get(url, headers={"Last-Event-ID": str(len(frames))})
    assert over.status_code == 204
    assert service.http.get(url, headers={"Last-Event-ID": "x"}).status_code == 422


def test_a_live_watch_sees_what_comes(service):
    job_id = service.submit()
    with service.http.stream("GET", f"/api/v1/rayjobs/{job_id}/watch?types=all") as answer:
        lines = answer.iter_lines()
        seen = [json.loads(next(lines)), json.loads(next(lines))]
        assert [event["status"] for event in seen] == ["ACCEPTED", "QUEUED"]
        service.run(job_id)
        assert [json.loads(next(lines))["status"] for _ in range(3)] == ["PROVISIONING", "PREFLIGHT", "RUNNING"]
        for n in range(20):
            service.lines(job_id, [f"line {n}"])
            assert json.loads(next(lines))["line"] == f"line {n}"
        service.end(job_id, Status.FAILED, **failure(failing_rank=5))
        last = [json.loads(line) for line in lines][-1]
    assert (last["type"], last["status"], last["failing_rank"]) == ("final", "FAILED", 5)


def test_silence_is_filled_with_blank_lines(tmp_path):
    with running(tmp_path / "data", keep_alive=0.05) as service:
        job_id = service.submit()
        with service.http.stream("GET", f"/api/v1/rayjobs/{job_id}/watch") as answer:
            blank = 0
            for line in answer.iter_lines():
                blank += line == ""
                if blank == 3:
                    break


def test_a_client_that_leaves_gives_its_place_back(tmp_path):
    with running(tmp_path / "data", limits=Limits(watchers=2)) as service:
        job_id = service.submit()
        url = f"/api/v1/rayjobs/{job_id}/watch"
        with service.http.stream("GET", url) as one, service.http.stream("GET", url) as two:
            assert (one.status_code, two.status_code) == (200, 200)
            third = service.http.get(url)
            assert third.status_code == 503
            assert third.headers["Retry-After"]
        until(lambda: service.service.watchers.count == 0, "the places are free again")
        assert service.service.journal._waiting == {}


def test_shutdown_with_100_watchers_cuts_all_of_them_soon(tmp_path):
    with running(tmp_path / "data") as service, ExitStack() as connections:
        job_id = service.submit()
        address = ("127.0.0.1", service.service.settings.port)
        watching = [connections.enter_context(socket.create_connection(address, timeout=20)) for _ in range(100)]
        for connection in watching:
            connection.sendall(f"GET /api/v1/rayjobs/{job_id}/watch HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until(lambda: service.service.watchers.count == 100, "all watch")
        service.run(job_id)
        service.lines(job_id, ["for everyone"])
        until(lambda: all(b"for everyone" in seen(connection) for connection in watching), "all have seen it")
        begun = time.monotonic()
        service.stop()
        took = time.monotonic() - begun
        bodies = [whole(connection) for connection in watching]
    assert took < 10  # 2 s when the machine is ours alone
    assert all(body.count(b"for everyone") == 1 and not body.endswith(b"0\r\n\r\n") for body in bodies)


def seen(connection: socket.socket) -> bytes:
    return connection.recv(1 << 20, socket.MSG_PEEK)


def whole(connection: socket.socket) -> bytes:
    body = b""
    while piece := connection.recv(1 << 20):
        body += piece
    return body


def test_a_reader_that_does_not_read_holds_one_page_at_most(tmp_path):
    with running(tmp_path / "data") as service:
        job_id = service.submit()
        service.run(job_id)
        with socket.create_connection(("127.0.0.1", service.service.settings.port)) as slow:
            slow.sendall(f"GET /api/v1/rayjobs/{job_id}/watch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            until(lambda: service.service.watchers.count == 1, "it watches")
            for _ in range(20):
                service.lines(job_id, ["x" * 60_000] * 10)
            service.end(job_id, Status.SUCCEEDED)
            assert service.events(job_id, types="final")[-1]["status"] == "SUCCEEDED"
            received = 0
            while piece := slow.recv(1 << 20):
                received += len(piece)
                if piece.endswith(b"0\r\n\r\n"):
                    break
        assert received > 20 * 10 * 60_000


def test_logs_as_text(service):
    job_id = finished(service)
    url = f"/api/v1/rayjobs/{job_id}/logs"
    assert service.http.get(url).text == "one\ntwo ☃\n[node-0/rank-0] r0\n[node-0/rank-1] r1\n"
    assert service.http.get(url, params={"rank": 1}).text == "r1\n"
    assert service.http.get(url, params={"tail": 2}).text == "[node-0/rank-0] r0\n[node-0/rank-1] r1\n"
    assert service.http.get(url, params={"rank": 0, "tail": 5}).text == "r0\n"
    assert service.http.get(url, params={"attempt": 2}).text == ""
    assert service.http.get("/api/v1/rayjobs/rj-000000000000/logs").status_code == 404


def test_logs_of_a_running_job_end_where_they_are(service):
    job_id = service.submit()
    service.run(job_id)
    service.lines(job_id, [f"l{n}" for n in range(50)])
    assert service.http.get(f"/api/v1/rayjobs/{job_id}/logs", params={"tail": 3}).text == "l47\nl48\nl49\n"


def test_events_without_logs_in_pages(service):
    job_id = finished(service)
    url = f"/api/v1/rayjobs/{job_id}/events"
    whole = service.http.get(url).json()
    assert whole["done"]
    assert [event["type"] for event in whole["events"]][-1] == "final"
    assert "log" not in {event["type"] for event in whole["events"]}
    first = service.http.get(url, params={"limit": 2}).json()
    rest = service.http.get(url, params={"after_seq": first["next_seq"]}).json()
    assert first["events"] + rest["events"] == whole["events"]
    assert not first["done"]


def test_a_waiting_job_has_events_and_is_not_done(service):
    job_id = service.submit()
    answer = service.http.get(f"/api/v1/rayjobs/{job_id}/events").json()
    assert [event["status"] for event in answer["events"]] == ["ACCEPTED", "QUEUED"]
    assert not answer["done"]
    assert service.store.get(job_id).state is JobState.QUEUED
