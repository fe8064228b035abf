"""Submit, list, show, cancel, renew, clean up: the calls and what they refuse."""

from __future__ import annotations

import json

import pytest

from corral.job.protocol.states import JobState, Status
from corral.job.service.settings import Limits, Profile
from tests.job.service.running import failure, running

REFERENCE = {
    "repository": "org/fork",
    "commit_sha": "0123456789abcdef0123456789abcdef01234567",
    "branch": "main",
    "github_run_id": "1",
    "github_run_attempt": 2,
    "image": "registry.example.com/images/trainer:8.5",
    "name_suffix": "multinode",
    "script": "/tmp/ray_bootstrap.sh",
    "args": ["--script-path", "/verl/tests/run.sh", "--flag", "x y"],
    "env": {"HF_HOME": "/cache"},
    "worker_replicas": 2,
}


def test_a_new_job_then_the_same_then_another_under_its_key(service):
    body = {"script": "run.sh", "bundle": service.bundle(), "args": ["1"]}
    key = {"Idempotency-Key": "k1"}
    first = service.http.post("/api/v1/rayjobs", json=body, headers=key)
    dry = service.http.post("/api/v1/rayjobs", json=body | {"dry_run": True}, headers=key)
    assert (dry.status_code, dry.json()["created"], dry.json()["state"]) == (200, False, "QUEUED")
    again = service.http.post("/api/v1/rayjobs", json=body, headers=key)
    other = service.http.post("/api/v1/rayjobs", json=body | {"args": ["2"]}, headers=key)
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["job_id"] == again.json()["job_id"]
    assert first.json()["created"]
    assert not again.json()["created"]
    assert first.json()["job_id"] in other.json()["error"]
    assert service.store.get(first.json()["job_id"]).state is JobState.QUEUED


@pytest.mark.parametrize("key", ["", "a b", "x" * 201])
def test_an_idempotency_key_that_is_none(service, key):
    body = {"script": "run.sh", "bundle": service.bundle()}
    answer = service.http.post("/api/v1/rayjobs", json=body, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json().keys() == {"error"}


def test_a_ci_run_is_its_own_key_and_a_local_submit_has_none(service):
    body = {"script": "run.sh", "bundle": service.bundle()}
    run = body | {"github_run_id": "77", "github_run_attempt": 1}
    one, two = (service.http.post("/api/v1/rayjobs", json=run).json()["job_id"] for _ in range(2))
    three, four = (service.http.post("/api/v1/rayjobs", json=body).json()["job_id"] for _ in range(2))
    assert one == two
    assert three != four


def test_the_reference_payload_runs_the_script_behind_the_bootstrap(tmp_path):
    root = tmp_path / "shared"
    (root / "tests").mkdir(parents=True)
    (root / "tests/run.sh").write_text("true")
    profile = Profile(devices_per_node=4, bootstraps=("ray_bootstrap.sh",))
    with running(tmp_path / "data", source_roots={"/verl": root}, profile=profile) as service:
        answer = service.http.post("/api/v1/rayjobs", json=REFERENCE | {"dry_run": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["command"] == ["bash", str(root / "tests/run.sh"), "--flag", "x y"]
        assert answer.json()["cwd"] == str(root)
        assert answer.json()["resources"] == {"nodes": 2, "accelerators_per_node": 4, "kind": "auto"}
        assert service.store.jobs() == []
        job_id = service.http.post("/api/v1/rayjobs", json=REFERENCE).json()["job_id"]
        assert service.store.get(job_id).request.resources.devices == 8
        missing = REFERENCE | {"args": ["--script-path", "/verl/tests/nightly/run.sh"], "github_run_id": "2"}
        answer = service.http.post("/api/v1/rayjobs", json=missing)
        assert answer.status_code == 422
        assert "nightly/run.sh' does not exist" in answer.json()["error"]


def test_a_root_the_service_cannot_see_is_left_to_the_preflight(tmp_path):
    with running(tmp_path / "data", source_roots={"/verl": tmp_path / "elsewhere"}) as service:
        answer = service.http.post("/api/v1/rayjobs", json={"script": "/verl/run.sh"})
        assert answer.status_code == 201
        assert "checked when the job starts" in answer.json()["notices"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"script": "gone.sh"}, "script 'gone.sh' is not in the bundle"),
        ({"script": "train.sh"}, "it has examples/train.sh"),
        ({"script": "../run.sh"}, "leaves the source"),
        ({"script": "/etc/passwd"}, "leaves the source"),
        ({"script": "/etc/passwd", "bundle": None}, "lies under no source root"),
        ({"script": "run.sh", "bundle": None}, "is relative; upload a bundle"),
        ({"bundle": "0" * 64}, "is not here; upload it first"),
        ({"resources": {"nodes": 9}}, "9 nodes x 1 devices asked for"),
        ({"resources": {"nodes": 3}, "worker_replicas": 2}, "differ; give one"),
        ({"secrets": ["API_KEY"]}, "this service holds none"),
        ({"secrets": ["../agent.key"]}, "is not a variable name"),
        ({"env": {"LD_PRELOAD": "x.so"}}, "env LD_PRELOAD is refused"),
        ({"env": {"BASH_ENV": "x"}}, "env BASH_ENV is refused"),
        ({"env": {"RAY_ADDRESS": "x"}}, "env RAY_ADDRESS is refused"),
        ({"env": {"A B": "x"}}, "is not a variable name"),
        ({"env": {"A": "\0hunter2"}}, "NUL byte"),
        ({"env": {"A": "hunter2" * 20_000}}, "the limit is"),
        ({"repository": "a/b/c"}, "repository="),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"args": ["x"] * 257}, "args: "),
        ({"args": ["x" * 20_000]}, "an argument"),
        ({"timeouts": {"run": -1}}, "timeouts.run"),
        ({"name_suffix": "a\nb"}, "name_suffix="),
    ],
)
def test_what_cannot_run_is_refused_with_one_line(service, change, said):
    body = {"script": "run.sh", "bundle": service.bundle()} | change
    before = len(service.store.jobs())
    answer = service.http.post("/api/v1/rayjobs", json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code == 422, answer.text
    assert set(answer.json()) == {"error"}
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert "hunter2" not in answer.text
    assert len(service.store.jobs()) == before


def test_secrets_are_named_and_never_shown(tmp_path):
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "API_KEY").write_text("hunter2")
    with running(tmp_path / "data", secrets_dir=folder) as service:
        job_id = service.submit(secrets=["API_KEY"], env={"PLAIN": "visible?"})
        shown = service.http.get(f"/api/v1/rayjobs/{job_id}")
        assert shown.json()["secrets"] == ["API_KEY"]
        assert shown.json()["env"] == ["PLAIN"]
        assert "hunter2" not in shown.text
        assert "visible?" not in shown.text
        refused = service.http.post(
            "/api/v1/rayjobs", json={"script": "run.sh", "bundle": service.bundle(), "secrets": ["OTHER"]}
        )
        assert refused.status_code == 422


def test_images_of_the_profile(tmp_path):
    with running(tmp_path / "data", profile=Profile(images=("registry.example.com/*",))) as service:
        body = {"script": "run.sh", "bundle": service.bundle()}
        good = service.http.post("/api/v1/rayjobs", json=body | {"image": "registry.example.com/a:1"})
        bad = service.http.post("/api/v1/rayjobs", json=body | {"image": "evil.example.com/a:1"})
        assert (good.status_code, bad.status_code) == (201, 422)


def test_a_full_queue_refuses_new_jobs_and_still_knows_the_old(tmp_path):
    with running(tmp_path / "data", limits=Limits(queued=2)) as service:
        body = {"script": "run.sh", "bundle": service.bundle()}
        answers = [
            service.http.post("/api/v1/rayjobs", json=body, headers={"Idempotency-Key": key})
            for key in ("a", "b", "c", "a")
        ]
        assert [answer.status_code for answer in answers] == [201, 201, 429, 200]
        assert answers[2].headers["Retry-After"]
        service.http.post(f"/api/v1/rayjobs/{answers[0].json()['job_id']}/cancel")


def test_dry_run_stores_nothing_and_says_what_is_ahead(service):
    service.submit(priority=5)
    before = len(service.store.jobs())
    body = {"script": "run.sh", "bundle": service.bundle(), "args": ["a"], "dry_run": True}
    answer = service.http.post("/api/v1/rayjobs", json=body)
    assert answer.status_code == 200
    assert answer.json()["command"] == ["bash", "run.sh", "a"]
    assert answer.json()["ahead"] >= 1
    assert len(service.store.jobs()) == before


def test_listing_pages_and_filters(service):
    ids = [service.submit(labels={"suite": "paging", "n": str(n)}) for n in range(5)]
    seen, after = [], None
    while True:
        query = {"label": "suite=paging", "limit": "2"} | ({"after": after} if after else {})
        page = service.http.get("/api/v1/rayjobs", params=query).json()
        seen += [job["job_id"] for job in page["jobs"]]
        if (after := page["next"]) is None:
            break
    assert seen == ids[::-1]
    assert service.http.get("/api/v1/rayjobs", params={"after": "rj-000000000000"}).status_code == 422
    assert service.http.get("/api/v1/rayjobs", params={"label": "suite=\0"}).status_code == 422
    one = service.http.get("/api/v1/rayjobs", params={"label": "n=3"}).json()["jobs"]
    assert [job["job_id"] for job in one] == [ids[3]]


def test_cancel_is_asked_for_once_and_answers_always(service):
    job_id = service.submit()
    first = service.http.post(f"/api/v1/rayjobs/{job_id}/cancel")
    again = service.http.post(f"/api/v1/rayjobs/{job_id}/cancel")
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["cancel"] == again.json()["cancel"] == "cancelled_by_user"
    assert service.http.post("/api/v1/rayjobs/rj-000000000000/cancel").status_code == 404


def test_a_heartbeat_renews_the_lease_of_a_job_that_has_one(service):
    leased, free = service.submit(lease=600), service.submit()
    before = service.store.get(leased).lease_until
    answer = service.http.post(f"/api/v1/rayjobs/{leased}/heartbeat").json()
    assert answer["lease_until"] >= before
    assert service.store.get(leased).lease_until == answer["lease_until"]
    assert service.http.post(f"/api/v1/rayjobs/{free}/heartbeat").json()["lease_until"] is None


def test_clean_up_of_a_workflow_twice_and_of_an_empty_one(service):
    mine = service.submit(github_run_id="900", name_suffix="a")
    over = service.submit(github_run_id="900", name_suffix="b")
    other = service.submit(github_run_id="900", name_suffix="a", github_run_attempt=2)
    service.run(over)
    service.end(over, Status.FAILED, **failure())
    for _ in range(2):
        swept = service.http.delete("/api/v1/workflows/900", params={"attempt": 1}).json()
        actions = {job["job_id"]: job["action"] for job in swept["jobs"]}
        assert actions == {mine: "cancelling", over: "already_over"}
        assert swept["pending"] == 1
    assert service.store.get(mine).cancel == "cleaned_up"
    assert service.store.get(other).cancel is None
    empty = service.http.delete("/api/v1/workflows/901", params={"attempt": 1})
    assert empty.status_code == 200
    assert empty.json()["jobs"] == []
    assert service.http.delete("/api/v1/workflows/a%20b").status_code == 422


def test_the_queue_in_order(tmp_path):
    with running(tmp_path / "data", devices=4) as service:
        big = service.submit(resources={"nodes": 1, "accelerators_per_node": 4})
        small = service.submit()
        urgent = service.submit(priority=10)
        shown = service.http.get("/api/v1/queue").json()
        assert [(job["job_id"], job["ahead"]) for job in shown["waiting"]] == [(urgent, 0), (big, 1), (small, 5)]
        assert [job["starts_next"] for job in shown["waiting"]] == [True, False, False]
        service.run(urgent)
        assert service.http.get("/api/v1/queue").json()["held"] == 1


def test_deep_json_broken_json_and_no_json(service):
    for content in (
        b"[" * 100_000,
        b'{"args":' + b"[" * 5000,
        b"{",
        b"",
        b"\xff",
        b'{"script": "\\ud800"}',
        b"null",
        b"[]",
    ):
        answer = service.http.post("/api/v1/rayjobs", content=content)
        assert answer.status_code in {400, 422}, content[:20]
        assert json.loads(answer.text).keys() == {"error"}
