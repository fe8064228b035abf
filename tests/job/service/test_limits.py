"""Hostile requests: none is answered with 5xx, none gets at a file, all get one line."""

from __future__ import annotations

import socket

import pytest

from corral.job.service.settings import Limits
from tests.job.service.running import bundle, running


def raw(service, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", service.service.settings.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "path",
    [
        b"/../../../../etc/passwd",
        b"/api/v1/bundles/../../agent.key",
        b"/api/v1/bundles/..%2f..%2fagent.key",
        b"/api/v1/bundles/%2e%2e/%2e%2e/agent.key",
        b"/api/v1/rayjobs/../../../agent.key/logs",
        b"/api/v1/rayjobs/%2e%2e%2f%2e%2e%2fagent.key/logs",
        b"/api/v1/rayjobs/rj-000000000000%00/logs",
        b"/api/v1/rayjobs/%ff%fe",
        b"/api/v1/workflows/%00",
        b"//etc/passwd",
        b"/openapi.json",
        b"/docs",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"PUT", b"DELETE"])
def test_no_path_leads_to_a_file(service, method, path):
    answer = raw(service, method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500, answer[:200]
    assert b"root:" not in answer
    assert b'{"error":' in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\nConnection: close\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
)
def test_broken_http_is_refused(service, request_bytes):
    answer = raw(service, request_bytes)
    assert answer.split(b" ", 2)[1][:1] == b"4"


def test_a_body_is_counted_while_it_comes(service):
    too_much = b"x" * (300 << 10)
    announced = service.http.post("/api/v1/rayjobs", content=too_much)
    streamed = service.http.post("/api/v1/rayjobs", content=iter([too_much[:1000]] * 300))
    for answer in (announced, streamed):
        assert answer.status_code == 413
        assert "262144 bytes" in answer.json()["error"]


def test_a_body_that_never_ends_is_not_read_for_ever(service):
    with socket.create_connection(("127.0.0.1", service.service.settings.port), timeout=20) as connection:
        connection.sendall(b"POST /api/v1/rayjobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        answer = b""
        try:
            for _ in range(1000):
                connection.sendall(chunk)
            answer = connection.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return  # refused and closed while we were still sending: 64 MiB were not swallowed
        assert b" 413 " in answer


def test_a_client_that_goes_away_in_the_middle_is_no_error_of_ours(service):
    with socket.create_connection(("127.0.0.1", service.service.settings.port)) as connection:
        connection.sendall(b"POST /api/v1/rayjobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert service.http.get("/healthz").status_code == 200
    assert 'status="5xx"' not in service.http.get("/metrics").text


def test_bundles_are_checked_and_bounded(tmp_path):
    with running(tmp_path / "data", limits=Limits(bundle=50_000)) as service:
        digest, content = bundle(("run.sh",))
        url = f"/api/v1/bundles/{digest}"
        assert service.http.head(url).status_code == 404
        assert service.http.put(url, content=content + b"x").status_code == 422
        assert service.http.head(url).status_code == 404
        assert service.http.put(url, content=content).status_code == 201
        assert service.http.put(url, content=content).status_code == 200
        assert service.http.head(url).status_code == 200
        big = service.http.put(f"/api/v1/bundles/{'0' * 64}", content=b"x" * 60_000)
        assert big.status_code == 413
        assert service.http.put("/api/v1/bundles/xyz", content=content).status_code == 422
        left = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and "bundles" in path.parts]
        assert len(left) == 1


def test_a_bundle_that_is_no_archive(service):
    import hashlib

    content = b"this is no archive"
    digest = hashlib.sha256(content).hexdigest()
    answer = service.http.put(f"/api/v1/bundles/{digest}", content=content)
    if answer.status_code == 422:
        return
    body = {"script": "run.sh", "bundle": digest}
    assert service.http.post("/api/v1/rayjobs", json=body).status_code == 422


def test_a_method_that_a_path_does_not_have(service):
    answer = service.http.patch("/api/v1/rayjobs")
    assert answer.status_code == 405
    assert answer.json().keys() == {"error"}


def test_an_exception_nobody_expected_is_an_id_and_no_more(service, monkeypatch, capfd):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("hunter2")

    monkeypatch.setattr(service.store, "jobs", broken)
    answer = service.http.get("/api/v1/rayjobs")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("internal error ")
    assert "hunter2" not in answer.text


def test_metrics(service):
    job_id = service.submit()
    service.run(job_id)
    service.lines(job_id, ["a", "b", "c"])
    text = service.http.get("/metrics").text
    assert 'corral_jobs{state="RUNNING"} 1.0' in text
    assert "corral_ingested_lines_total 3.0" in text
    assert "corral_watchers 0.0" in text
    assert 'route="/api/v1/rayjobs"' in text
    assert job_id not in text
