"""What is tested with this API server means something only if it behaves. Asked by plain HTTP, and by kubectl."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from tests.job.backends.kube import selectors
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.patching import PatchError, merged, patched

SCHEMA = Path(os.environ.get("CORRAL_TEST_DATA", "/nonexistent")) / "kuberay" / "rayjob-v1.schema.json"
JOBS = "/apis/ray.io/v1/namespaces/corral/rayjobs"
PODS = "/api/v1/namespaces/corral/pods"


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube() as kube:
        yield kube


@pytest.fixture
def http(kube: FakeKube) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=kube.url, trust_env=False) as http:
        yield http


def job(name: str, **about: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "head", "image": "an-image"}]}}
    head = {"rayStartParams": {"num-cpus": "0"}, "template": template}
    spec = {"submissionMode": "InteractiveMode", "rayClusterSpec": {"headGroupSpec": head}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name, **about}, "spec": spec}


def owned(kube: FakeKube, plural: str, name: str, owner: dict[str, Any], blocks: bool = True) -> dict[str, Any]:
    reference = {"uid": owner["metadata"]["uid"], "name": owner["metadata"]["name"], "kind": owner["kind"]}
    reference |= {"apiVersion": owner["apiVersion"], "blockOwnerDeletion": blocks}
    return kube.create(plural, {"metadata": {"name": name, "ownerReferences": [reference]}})


def names(kube: FakeKube, plural: str) -> list[str]:
    return [thing["metadata"]["name"] for thing in kube.objects(plural)]


def test_what_a_server_adds_and_refuses_on_create(http: httpx.Client) -> None:
    made = http.post(JOBS, json=job("one") | {"status": {"jobStatus": "mine"}})
    about = made.json()["metadata"]
    assert (made.status_code, about["namespace"], about["generation"]) == (201, "corral", 1)
    assert {"uid", "creationTimestamp", "resourceVersion"} <= about.keys()
    assert "status" not in made.json()
    again = http.post(JOBS, json=job("one"))
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyExists")
    several = {
        http.post(PODS, json={"metadata": {"generateName": "pod-"}}).json()["metadata"]["name"] for _ in range(3)
    }
    assert len(several) == 3
    assert http.post(PODS, json={"metadata": {}}).status_code == 422
    assert http.post(PODS, json={"metadata": {"name": "x", "namespace": "default"}}).status_code == 400
    assert http.post(JOBS, json=job("two") | {"kind": ""}).status_code == 400
    assert http.post(JOBS, json=job("two") | {"apiVersion": "ray.io/v1alpha1"}).status_code == 400
    assert http.post(PODS, content=b"{").status_code == 400
    assert http.post("/api/v1/namespaces/nowhere/pods", json={"metadata": {"name": "x"}}).status_code == 404


def test_an_update_needs_the_newest_version_and_changes_what_it_may(http: httpx.Client) -> None:
    old = http.post(JOBS, json=job("one")).json()
    new = http.put(f"{JOBS}/one", json={**old, "spec": {**old["spec"], "suspend": True}}).json()
    assert new["metadata"]["generation"] == 2
    assert http.put(f"{JOBS}/one", json=old).status_code == 409
    assert http.put(f"{JOBS}/one", json=job("one")).status_code == 422
    assert http.put(f"{JOBS}/two", json=new).status_code == 404
    status = http.put(f"{JOBS}/one/status", json={**new, "spec": {}, "status": {"jobStatus": "RUNNING"}}).json()
    assert (status["spec"], status["status"], status["metadata"]["generation"]) == (
        new["spec"],
        {"jobStatus": "RUNNING"},
        2,
    )
    assert http.patch(f"{JOBS}/one", json={}, headers={"Content-Type": "application/json"}).status_code == 415
    merge = {"Content-Type": "application/merge-patch+json"}
    same = http.patch(f"{JOBS}/one", json={"spec": {"suspend": True}, "status": {"jobStatus": "x"}}, headers=merge)
    assert same.json() == status  # nothing changed, so there is no new version
    guarded = http.patch(f"{JOBS}/one", json={"metadata": {"resourceVersion": "1"}}, headers=merge)
    assert guarded.status_code == 409


def test_a_finaliser_keeps_what_is_deleted_until_it_is_gone(kube: FakeKube, http: httpx.Client) -> None:
    http.post(JOBS, json=job("one", finalizers=["a/a", "b/b"]))
    gone = http.delete(f"{JOBS}/one").json()
    assert gone["metadata"]["deletionTimestamp"]
    assert http.delete(f"{JOBS}/one").json() == gone
    merge = {"Content-Type": "application/merge-patch+json"}
    more = http.patch(f"{JOBS}/one", json={"metadata": {"finalizers": ["a/a", "b/b", "c/c"]}}, headers=merge)
    assert more.status_code == 422
    left = http.patch(f"{JOBS}/one", json={"metadata": {"finalizers": ["b/b"]}}, headers=merge)
    assert left.json()["metadata"]["finalizers"] == ["b/b"]
    assert names(kube, "rayjobs") == ["one"]
    http.patch(f"{JOBS}/one", json={"metadata": {"finalizers": []}}, headers=merge)
    assert names(kube, "rayjobs") == []
    assert http.delete(f"{JOBS}/one").status_code == 404


def test_dependants_follow_their_owner(kube: FakeKube) -> None:
    owner = kube.create("rayjobs", job("owner"))
    cluster = owned(kube, "rayclusters", "cluster", owner)
    owned(kube, "pods", "head", cluster)
    kube.create("pods", {"metadata": {"name": "alone"}})
    kube.delete("rayjobs", "owner")
    assert (names(kube, "rayclusters"), names(kube, "pods")) == ([], ["alone"])


def test_in_the_foreground_the_owner_goes_last(kube: FakeKube) -> None:
    owner = kube.create("rayjobs", job("owner"))
    cluster = owned(kube, "rayclusters", "cluster", owner)
    kube.patch("rayclusters", "cluster", {"metadata": {"finalizers": ["test/held"]}})
    owned(kube, "pods", "head", cluster)
    kube.delete("rayjobs", "owner", propagation="Foreground")
    assert (names(kube, "rayjobs"), names(kube, "rayclusters"), names(kube, "pods")) == (["owner"], ["cluster"], [])
    assert kube.objects("rayjobs")[0]["metadata"]["finalizers"] == ["foregroundDeletion"]
    kube.patch("rayclusters", "cluster", {"metadata": {"finalizers": None}})
    assert (names(kube, "rayjobs"), names(kube, "rayclusters")) == ([], [])


def test_orphans_stay_and_a_held_collector_does_nothing(kube: FakeKube) -> None:
    owner = kube.create("rayjobs", job("owner"))
    owned(kube, "pods", "orphan", owner)
    kube.delete("rayjobs", "owner", propagation="Orphan")
    assert kube.objects("pods")[0]["metadata"]["ownerReferences"] == []
    other = kube.create("rayjobs", job("other"))
    owned(kube, "pods", "left", other)
    kube.store.gc_held = True
    kube.delete("rayjobs", "other")
    assert names(kube, "pods") == ["left", "orphan"]
    kube.store.gc_held = False
    kube.store.collect()
    assert names(kube, "pods") == ["orphan"]


@pytest.mark.skipif(not SCHEMA.is_file(), reason="needs the RayJob schema under CORRAL_TEST_DATA/kuberay")
def test_a_rayjob_loses_what_the_schema_does_not_know_and_has_to_fit_it(http: httpx.Client) -> None:
    kept = http.post(JOBS, json=job("one") | {"spec": {**job("one")["spec"], "surprise": 1}}).json()
    assert "surprise" not in kept["spec"]
    assert kept["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    wrong = job("two")
    wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] = {"num-cpus": 0}
    refused = http.post(JOBS, json=wrong)
    assert (refused.status_code, refused.json()["reason"]) == (422, "Invalid")
    assert "rayStartParams.num-cpus" in refused.json()["message"]


def test_hooks_see_every_change_in_order_and_may_call_the_server(kube: FakeKube) -> None:
    seen: list[tuple[str, str]] = []
    done = threading.Event()

    def hook(shown: str, thing: dict[str, Any]) -> None:
        seen.append((shown, thing["metadata"]["name"]))
        if (shown, thing["kind"]) == ("ADDED", "RayJob"):
            httpx.post(f"{kube.url}{PODS}", json={"metadata": {"name": "by-hook"}}, trust_env=False).raise_for_status()
        if thing["metadata"]["name"] == "last":
            done.set()

    kube.on_change(hook)
    kube.create("rayjobs", job("one"))
    kube.wait(lambda: kube.find("pods", "by-hook"))
    kube.delete("rayjobs", "one")
    kube.create("pods", {"metadata": {"name": "last"}})
    assert done.wait(30)
    assert seen == [("ADDED", "one"), ("ADDED", "by-hook"), ("DELETED", "one"), ("ADDED", "last")]


def test_what_a_hook_raises_is_raised_at_the_end() -> None:
    kube = FakeKube()
    kube.on_change(lambda shown, thing: dict[str, None]()[shown])
    kube.create("rayjobs", job("one"))
    with pytest.raises(KeyError):
        kube.close()


def test_faults_add_up_and_are_counted(kube: FakeKube, http: httpx.Client) -> None:
    slow = kube.faults.slow(0.01, verb="get", times=None)
    broken = kube.faults.status(503, verb="get", resource="pods", skip=1)
    busy = kube.faults.status(429, retry_after=3, resource="pods", name="p*")
    kube.create("pods", {"metadata": {"name": "pod"}})
    answers = [http.get(f"{PODS}/pod") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 503, 200]
    assert answers[0].headers["Retry-After"] == "3"
    assert (slow.fired, broken.fired, busy.fired) == (3, 1, 1)
    assert kube.count("get", "pods") == 3


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("", "abc"),
        ("app=x", "ab"),
        ("app==x,tier!=back", "a"),
        ("tier", "b"),
        ("!tier", "ac"),
        ("app in (x, y),tier notin (back)", "ac"),
        ("corral.dev/of!=me", "abc"),
    ],
)
def test_label_selectors(selector: str, wanted: str) -> None:
    things = {"a": {"app": "x"}, "b": {"app": "x", "tier": "back"}, "c": {"app": "y"}}
    matches = selectors.labels(selector)
    assert "".join(name for name, labels in things.items() if matches({"metadata": {"labels": labels}})) == wanted


def test_patches() -> None:
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": [4]}, "e": {"f": None}}) == {
        "b": {"c": [4], "d": 3},
        "e": {},
    }
    document = {"list": [1, 2], "a/b": {"~": 1}}
    operations = [
        {"op": "add", "path": "/list/-", "value": 3},
        {"op": "replace", "path": "/a~1b/~0", "value": 2},
        {"op": "move", "from": "/list/0", "path": "/first"},
        {"op": "copy", "from": "/a~1b", "path": "/copy"},
        {"op": "test", "path": "/copy/~0", "value": 2},
        {"op": "remove", "path": "/a~1b"},
    ]
    assert patched(document, operations) == {"list": [2, 3], "first": 1, "copy": {"~": 2}}
    for wrong in ({"op": "test", "path": "/list", "value": []}, {"op": "remove", "path": "/no"}, {"op": "add"}):
        with pytest.raises(PatchError):
            patched(document, [wrong])
    assert document == {"list": [1, 2], "a/b": {"~": 1}}


def test_a_websocket_goes_through_to_a_service(kube: FakeKube) -> None:
    def echo(socket: ServerConnection) -> None:
        for message in socket:
            socket.send(f"{socket.request.path if socket.request else ''} {message!r}")

    with serve(echo, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        kube.create("services", {"metadata": {"name": "head"}})
        kube.serve("head", 8265, server.socket.getsockname())
        url = kube.url.replace("http", "ws") + "/api/v1/namespaces/corral/services/http:head:8265/proxy/tail?a=1"
        with connect(url, proxy=None) as socket:
            socket.send("hello")
            assert socket.recv(timeout=30) == "/tail?a=1 'hello'"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_understands_it(tmp_path: Path) -> None:
    with FakeKube() as kube:  # over plain HTTP kubectl shows no token
        environ = {
            "KUBECONFIG": str(kube.kubeconfig(tmp_path / "config")),
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
        }

        def kubectl(*arguments: str, text: str | None = None) -> str:
            done = subprocess.run(
                ["kubectl", *arguments], env=environ, input=text, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        kube.create("rayjobs", job("one", labels={"of": "me"}))
        kube.create("pods", {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "main"}]}})
        kube.log("pod", "main").write("hello\n")
        assert kubectl("get", "rayjobs", "-l", "of=me", "-o", "name") == "rayjob.ray.io/one\n"
        assert kubectl("get", "rayjob", "one", "-o", "jsonpath={.spec.submissionMode}") == "InteractiveMode"
        assert kubectl("logs", "pod") == "hello\n"
        made = "apiVersion: v1\nkind: Secret\nmetadata: {name: made}\nstringData: {key: value}\n"
        assert kubectl("create", "--validate=false", "-f", "-", text=made) == "secret/made created\n"
        kubectl("patch", "rayjob", "one", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        assert kube.find("rayjobs", "one")["spec"]["suspend"] is True  # type: ignore[index]
        kubectl("delete", "rayjob", "one", "--wait=true")
        assert kube.objects("rayjobs") == []
