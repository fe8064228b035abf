"""Tokens, scopes, repositories; and what is asked of a caller when there are no tokens."""

from __future__ import annotations

import json
import os

import pytest

from corral.errors import ConfigError
from corral.job.protocol.states import JobState
from corral.job.service.auth import agent_token, service_key
from corral.job.service.tokens import Token, TokenFile, add_token, new_token
from tests.job.service.running import bundle, running

EVERYTHING = ("submit", "read", "cancel")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """(service, clear tokens by name)."""
    folder = tmp_path_factory.mktemp("guarded")
    clear = {}
    entries = [
        ("ours", EVERYTHING, ("org/ours",), None),
        ("ours2", EVERYTHING, ("org/*",), None),
        ("theirs", EVERYTHING, ("org/theirs",), None),
        ("reader", ("read",), ("*",), None),
        ("admin", ("admin",), ("*",), None),
        ("old", EVERYTHING, ("*",), -1.0),
    ]
    for name, scopes, repositories, days in entries:
        clear[name], entry = new_token(name, frozenset(scopes), repositories, days)
        add_token(folder / "tokens.json", entry)
    with running(folder / "data", token_file=folder / "tokens.json") as service:
        yield service, clear


def call(guarded, name, method, path, **kwargs):
    service, clear = guarded
    token = clear.get(name, name)
    header = b"Bearer " + (token if isinstance(token, bytes) else token.encode())
    return service.http.request(method, path, headers={"Authorization": header}, **kwargs)


def submit(guarded, name, repository="org/ours", **fields):
    digest, content = bundle(("run.sh",))
    put = call(guarded, "admin", "PUT", f"/api/v1/bundles/{digest}", content=content)
    assert put.status_code in {200, 201}, put.text
    body = {"script": "run.sh", "bundle": digest, "repository": repository, **fields}
    return call(guarded, name, "POST", "/api/v1/rayjobs", json=body)


def test_health_is_open_and_nothing_else(guarded):
    service, _ = guarded
    assert service.http.get("/healthz").status_code == 200
    assert service.http.get("/readyz").status_code == 200
    for method, path in [
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/api/v1/queue"),
        ("GET", "/api/v1/rayjobs"),
        ("POST", "/api/v1/rayjobs"),
        ("GET", "/api/v1/rayjobs/rj-000000000000"),
        ("GET", "/api/v1/rayjobs/rj-000000000000/watch"),
        ("GET", "/api/v1/rayjobs/rj-000000000000/logs"),
        ("GET", "/api/v1/rayjobs/rj-000000000000/events"),
        ("POST", "/api/v1/rayjobs/rj-000000000000/cancel"),
        ("POST", "/api/v1/rayjobs/rj-000000000000/heartbeat"),
        ("DELETE", "/api/v1/workflows/1"),
        ("HEAD", "/api/v1/bundles/" + "0" * 64),
        ("PUT", "/api/v1/bundles/" + "0" * 64),
        ("POST", "/api/v1/agent/rj-000000000000/logs"),
        ("POST", "/api/v1/agent/rj-000000000000/heartbeat"),
        ("POST", "/api/v1/agent/rj-000000000000/end"),
        ("GET", "/api/v1/agent/rj-000000000000/watermarks?attempt=1"),
    ]:
        answer = service.http.request(method, path)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("token", ["x", "corral_" + "A" * 43, "a b", b"\xc3\xa9"])
def test_an_unknown_token(guarded, token):
    answer = call(guarded, token, "GET", "/version")
    assert answer.status_code == 401
    assert "corral_" not in answer.text


def test_an_expired_token_is_told_so(guarded):
    answer = call(guarded, "old", "GET", "/version")
    assert answer.status_code == 401
    assert "expired" in answer.json()["error"]


def test_scopes(guarded):
    job_id = submit(guarded, "ours").json()["job_id"]
    assert call(guarded, "reader", "GET", f"/api/v1/rayjobs/{job_id}").status_code == 200
    assert submit(guarded, "reader").status_code == 403
    assert call(guarded, "reader", "POST", f"/api/v1/rayjobs/{job_id}/cancel").status_code == 403
    assert call(guarded, "reader", "POST", f"/api/v1/rayjobs/{job_id}/heartbeat").status_code == 403
    assert call(guarded, "reader", "DELETE", "/api/v1/workflows/1").status_code == 403
    assert call(guarded, "reader", "HEAD", f"/api/v1/bundles/{'0' * 64}").status_code == 403
    assert call(guarded, "admin", "POST", f"/api/v1/rayjobs/{job_id}/cancel").status_code == 200


def test_a_job_of_another_repository_is_not_there(guarded):
    job_id = submit(guarded, "ours", github_run_id="5").json()["job_id"]
    assert submit(guarded, "theirs").status_code == 403
    for method, what in [
        ("GET", ""),
        ("GET", "/logs"),
        ("GET", "/events"),
        ("POST", "/cancel"),
        ("POST", "/heartbeat"),
    ]:
        assert call(guarded, "theirs", method, f"/api/v1/rayjobs/{job_id}{what}").status_code == 404, what
    watched = call(guarded, "theirs", "GET", f"/api/v1/rayjobs/{job_id}/watch").text
    assert json.loads(watched.splitlines()[-1])["status"] == "NOT_FOUND"
    assert call(guarded, "theirs", "GET", "/api/v1/rayjobs").json()["jobs"] == []
    assert call(guarded, "theirs", "GET", "/api/v1/queue").json()["waiting"] == []
    swept = call(guarded, "theirs", "DELETE", "/api/v1/workflows/5")
    assert (swept.status_code, swept.json()["jobs"]) == (200, [])
    assert job_id in {job["job_id"] for job in call(guarded, "ours2", "GET", "/api/v1/rayjobs").json()["jobs"]}


def test_a_sweep_reaches_own_jobs_or_all_for_an_admin(guarded):
    service, _ = guarded
    job_id = submit(guarded, "ours", github_run_id="6").json()["job_id"]
    assert call(guarded, "ours2", "DELETE", "/api/v1/workflows/6").json()["jobs"] == []
    assert service.store.get(job_id).cancel is None
    swept = call(guarded, "admin", "DELETE", "/api/v1/workflows/6").json()
    assert [job["job_id"] for job in swept["jobs"]] == [job_id]
    assert service.store.get(job_id).state in {JobState.QUEUED, JobState.CANCELLED}


def test_the_same_key_of_two_owners_is_two_jobs(guarded):
    run = {"github_run_id": "7", "name_suffix": "same"}
    one, two = submit(guarded, "ours", **run), submit(guarded, "ours2", **run)
    assert (one.status_code, two.status_code) == (201, 201)
    assert one.json()["job_id"] != two.json()["job_id"]


def test_an_agent_token_opens_its_own_job_only(guarded):
    service, _ = guarded
    job_id, other = (submit(guarded, "ours", name_suffix=name).json()["job_id"] for name in ("x", "y"))
    right = {"Authorization": f"Bearer {agent_token(service.service.agent_key, job_id)}"}
    path = "/api/v1/agent/{}/watermarks?attempt=1"
    assert service.http.get(path.format(job_id), headers=right).status_code == 200
    assert service.http.get(path.format(other), headers=right).status_code == 401
    assert service.http.get("/api/v1/rayjobs", headers=right).status_code == 401
    assert call(guarded, "admin", "GET", path.format(job_id)).status_code == 401


def test_the_token_file_is_read_again_and_half_of_one_lets_nobody_in(tmp_path):
    path = tmp_path / "tokens.json"
    clear, entry = new_token("one", frozenset({"read"}))
    add_token(path, entry)
    assert path.stat().st_mode & 0o777 == 0o600
    tokens = TokenFile(path)
    assert tokens.find(clear).name == "one"
    assert clear not in path.read_text()
    two, entry = new_token("two", frozenset({"read"}))
    assert tokens.find(two) is None
    add_token(path, entry)
    assert tokens.find(two).name == "two"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ConfigError):
        tokens.find(clear)
    path.write_text(whole)
    assert tokens.find(clear).name == "one"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        tokens.find(clear)


def test_a_broken_token_file_is_said_and_is_no_5xx_of_ours_in_disguise(tmp_path):
    path = tmp_path / "tokens.json"
    clear, entry = new_token("one", frozenset({"read"}))
    add_token(path, entry)
    with running(tmp_path / "data", token_file=path) as service:
        headers = {"Authorization": f"Bearer {clear}"}
        assert service.http.get("/version", headers=headers).status_code == 200
        path.write_text("{")
        answer = service.http.get("/version", headers=headers)
        assert answer.status_code == 503
        assert "token file" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hash": "abc"}, "hash"),
        ({"scopes": ["root"]}, "scopes"),
        ({"expires": "2027-01-01T00:00:00"}, "expires"),
        ({"extra": 1}, "extra"),
        ({"name": "a b"}, "name"),
        ({"salt": "abc"}, "salt"),
    ],
)
def test_an_entry_that_does_not_fit(tmp_path, change, said):
    _, entry = new_token("one", frozenset({"read"}))
    content = entry.model_dump(mode="json") | {"scopes": ["read"]} | change
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"tokens": [content]}))
    with pytest.raises(ConfigError, match=said):
        TokenFile(path)


def test_names_are_unique(tmp_path):
    _, entry = new_token("one", frozenset({"read"}))
    add_token(tmp_path / "t", entry)
    with pytest.raises(ConfigError, match="taken"):
        add_token(tmp_path / "t", entry)
    with pytest.raises(ConfigError, match="new token: name"):
        new_token("a b", frozenset({"read"}))


def test_a_token_fits_itself_only():
    clear, entry = new_token("one", frozenset({"read"}))
    other, _ = new_token("two", frozenset({"read"}))
    assert isinstance(entry, Token)
    assert entry.fits(clear)
    assert not entry.fits(other)
    assert not entry.fits("")
    assert not entry.fits(clear[:-1])


def test_the_agent_key_stays_and_is_private(tmp_path):
    key = service_key(tmp_path)
    assert service_key(tmp_path) == key
    assert (tmp_path / "agent.key").stat().st_mode & 0o777 == 0o600
    assert agent_token(key, "rj-000000000001") == agent_token(key, "rj-000000000001")
    assert agent_token(key, "rj-000000000001") != agent_token(key, "rj-000000000002")
    assert agent_token(os.urandom(32), "rj-000000000001") != agent_token(key, "rj-000000000001")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example.com"}, 403),
        ({"Host": "127.0.0.1.evil.example.com"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "https://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
def test_pages_of_other_sites_and_rebound_names_stay_out(service, headers, status):
    assert service.http.get("/version", headers=headers).status_code == status


def test_a_page_of_our_own_may_ask(service):
    assert service.http.get("/version", headers={"Origin": service.url}).status_code == 200
