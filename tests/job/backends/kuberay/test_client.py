"""The Kubernetes client against an API server over real HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from corral.errors import InfraError
from corral.job.backends.kuberay.client import PODS, RAYCLUSTERS, SECRETS, SERVICES, Change, KubeClient, Object
from corral.job.backends.kuberay.credentials import Credential, Fixed
from corral.job.backends.kuberay.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    Throttled,
    Unauthorized,
    Unreachable,
    error_of,
)
from corral.job.backends.kuberay.transport import Access
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.http import Exchange, Request, Server
from tests.job.backends.kuberay.near import QUICK, client_of, run, until


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube(tokens=["token-1"]) as kube:
        yield kube


def cluster(name: str, **spec: object) -> Object:
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": spec}


def test_an_object_is_made_read_changed_and_deleted(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            made = await client.create(RAYCLUSTERS, cluster("one", size=1))
            assert made["metadata"]["uid"]
            merged = await client.patch(RAYCLUSTERS, "one", {"spec": {"size": 2}})
            assert (merged["spec"], merged["metadata"]["generation"]) == ({"size": 2}, 2)
            listed = [
                {"op": "test", "path": "/spec/size", "value": 2},
                {"op": "add", "path": "/spec/more", "value": []},
            ]
            patched = await client.patch(RAYCLUSTERS, "one", listed)
            assert patched["spec"] == {"size": 2, "more": []}
            said = await client.patch_status(RAYCLUSTERS, "one", {"state": "ready"})
            assert (said["status"], said["spec"], said["metadata"]["generation"]) == (
                {"state": "ready"},
                {"size": 2, "more": []},
                3,
            )
            replaced = await client.replace(RAYCLUSTERS, said | {"spec": {}, "status": {"state": "not mine"}})
            assert (replaced["spec"], replaced["status"]) == ({}, {"state": "ready"})
            assert await client.get(RAYCLUSTERS, "one") == replaced
            assert await client.delete(RAYCLUSTERS, "one", uid=made["metadata"]["uid"])
            assert not await client.delete(RAYCLUSTERS, "one")

    run(life)
    assert kube.objects("rayclusters") == []


def test_every_refusal_is_an_error_of_its_kind(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            made = await client.create(RAYCLUSTERS, cluster("one"))
            with pytest.raises(AlreadyExists, match=r'409 AlreadyExists: rayclusters.ray.io "one" already exists'):
                await client.create(RAYCLUSTERS, cluster("one"))
            with pytest.raises(NotFound) as absent:
                await client.get(RAYCLUSTERS, "two")
            assert (absent.value.status, absent.value.reason) == (404, "NotFound")
            with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
                await client.create(RAYCLUSTERS, cluster("one"), namespace="nowhere")
            await client.patch(RAYCLUSTERS, "one", {"spec": {"size": 1}})
            with pytest.raises(Conflict) as newer:
                await client.replace(RAYCLUSTERS, made)
            assert not isinstance(newer.value, AlreadyExists)
            with pytest.raises(Conflict, match="uid in precondition"):
                await client.delete(RAYCLUSTERS, "one", uid="another")
            with pytest.raises(Conflict):
                await client.delete(RAYCLUSTERS, "one", resource_version=made["metadata"]["resourceVersion"])
            with pytest.raises(Invalid):
                await client.patch(RAYCLUSTERS, "one", [{"op": "remove", "path": "/spec/nothing"}])
            kube.faults.status(403, verb="get")
            with pytest.raises(Forbidden):
                await client.get(RAYCLUSTERS, "one")

    run(life)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_reads_are_tried_again(kube: FakeKube, status: int) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            await client.create(RAYCLUSTERS, cluster("one"))
            fault = kube.faults.status(status, verb="get", times=2)
            assert (await client.get(RAYCLUSTERS, "one"))["metadata"]["name"] == "one"
            assert fault.fired == 2
            kube.faults.status(status, verb="delete")
            assert await client.delete(RAYCLUSTERS, "one")

    run(life)


@pytest.mark.parametrize("way", ["lost", "cut_answer", "hang"])
def test_a_read_whose_answer_does_not_come_whole_is_tried_again(kube: FakeKube, way: str) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            await client.create(RAYCLUSTERS, cluster("one"))
            getattr(kube.faults, way)(verb="get")
            assert (await client.get(RAYCLUSTERS, "one"))["metadata"]["name"] == "one"

    run(life)
    assert kube.count("get") == 2


def test_a_create_whose_answer_is_lost_is_not_done_twice(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            kube.faults.lost(verb="create")
            with pytest.raises(Unreachable) as lost:
                await client.create(RAYCLUSTERS, {**cluster(""), "metadata": {"generateName": "one-"}})
            assert lost.value.sent
            kube.faults.status(500, verb="create")
            with pytest.raises(KubeError, match="500 InternalError"):
                await client.create(RAYCLUSTERS, cluster("two"))

    run(life)
    assert kube.count("create") == 2
    assert len(kube.objects("rayclusters")) == 1


def test_a_throttled_create_waits_as_long_as_it_is_told_and_is_done_once(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube, patience=replace(QUICK, retry=30.0)) as client:
            kube.faults.status(429, retry_after=1, verb="create")
            await client.create(RAYCLUSTERS, cluster("one"))

    run(life)
    first, second = [one.at for one in kube.requests if one.verb == "create"]
    assert second - first >= 1.0


def test_a_server_that_asks_for_more_patience_than_we_have_is_an_error_at_once(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            kube.faults.status(429, retry_after=3600, times=None)
            with pytest.raises(Throttled) as throttled:
                await client.get(RAYCLUSTERS, "one")
            assert throttled.value.retry_after == 3600

    run(life)
    assert kube.count("get") == 1


def test_patience_has_an_end(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            kube.faults.status(503, times=None)
            began = time.monotonic()
            with pytest.raises(KubeError, match="503 ServiceUnavailable"):
                await client.get(RAYCLUSTERS, "one")
            # Every pause but the first few is at least half of the cap: no more tries than fit.
            assert kube.count("get") <= 6 + (time.monotonic() - began) / (QUICK.cap / 2)

    run(life)


def test_nobody_there_is_unreachable_and_nothing_was_sent() -> None:
    with FakeKube() as kube:
        url = kube.url

    async def life() -> None:
        client = KubeClient(Access(url, "corral", Fixed(Credential())), replace(QUICK, retry=0.1))
        with pytest.raises(Unreachable, match="does not answer") as error:
            await client.create(PODS, {"metadata": {"name": "one"}})
        assert not error.value.sent
        assert isinstance(error.value, InfraError)
        await client.close()

    run(life)


def test_a_token_that_is_refused_is_not_tried_again_and_again(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube, Fixed(Credential("wrong"))) as client:
            with pytest.raises(Unauthorized, match="401 Unauthorized"):
                await client.get(RAYCLUSTERS, "one")

    run(life)
    assert len(kube.requests) == 1


def test_a_list_comes_page_by_page_under_its_selector(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.job.backends.kuberay.client._PAGE", 3)
    for index in range(10):
        labels = {"parity": str(index % 2), "app": "a"}
        kube.create("pods", {"metadata": {"name": f"pod-{index}", "labels": labels}})

    async def life() -> None:
        async with client_of(kube) as client:
            everything = await client.list(PODS)
            assert [pod["metadata"]["name"] for pod in everything.items] == [f"pod-{index}" for index in range(10)]
            assert everything.resource_version == str(kube.store.version)
            odd = await client.list(PODS, selector="parity in (1, 3),app=a,!gone", fields="metadata.name!=pod-3")
            assert [pod["metadata"]["name"] for pod in odd.items] == ["pod-1", "pod-5", "pod-7", "pod-9"]
            assert (await client.list(PODS, namespace="default")).items == []

    run(life)
    assert kube.count("list") == 4 + 2 + 1


def test_a_list_whose_pages_became_too_old_begins_anew(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.job.backends.kuberay.client._PAGE", 2)
    for index in range(5):
        kube.create("pods", {"metadata": {"name": f"pod-{index}"}})

    async def life() -> None:
        async with client_of(kube) as client:
            kube.faults.status(410, verb="list", skip=1)
            assert len((await client.list(PODS)).items) == 5
            assert kube.count("list") == 2 + 3
            kube.faults.status(410, verb="list", times=None)
            with pytest.raises(Gone):
                await client.list(PODS)

    run(life)


async def changes(client: KubeClient, version: str, count: int, **where: Any) -> list[Change]:
    found: list[Change] = []
    async with aclosing(client.watch(PODS, version, **where)) as watch:
        async for change in watch:
            found.append(change)
            if len(found) == count:
                break
    return found


def test_a_watch_tells_what_changed_for_those_it_selects(kube: FakeKube) -> None:
    start = str(kube.store.version)
    kube.create("pods", {"metadata": {"name": "other"}})
    kube.create("pods", {"metadata": {"name": "mine", "labels": {"of": "me"}}})
    kube.set_status("pods", "mine", {"phase": "Running"})
    kube.patch("pods", "mine", {"metadata": {"labels": {"of": "you"}}})
    kube.patch("pods", "mine", {"metadata": {"labels": {"of": "me"}}})
    kube.delete("pods", "mine")

    async def life() -> None:
        async with client_of(kube) as client:
            found = await changes(client, start, 5, selector="of=me")
            assert [change.type for change in found] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
            versions = [int(change.object["metadata"]["resourceVersion"]) for change in found]
            assert versions == sorted(set(versions))
            rest = await changes(client, str(versions[2]), 2, selector="of=me")
            assert [change.type for change in rest] == ["ADDED", "DELETED"]

    run(life)


def test_a_quiet_watch_has_bookmarks_and_ends_without_an_error() -> None:
    async def life() -> None:
        with FakeKube(bookmark_seconds=0.05) as kube:
            async with client_of(kube) as client:
                found = [change async for change in client.watch(PODS, str(kube.store.version), seconds=1)]
                assert len(found) > 1
                assert {change.type for change in found} == {"BOOKMARK"}
                assert found[-1].object["metadata"]["resourceVersion"] == str(kube.store.version)

    run(life)


@pytest.mark.parametrize(
    ("effect", "error"), [("gone", Gone), ("cut", Unreachable), ("freeze", Unreachable), ("end", None)]
)
def test_how_a_watch_ends(kube: FakeKube, effect: str, error: type[KubeError] | None) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            version = str(kube.store.version)
            kube.create("pods", {"metadata": {"name": "first"}})
            kube.create("pods", {"metadata": {"name": "second"}})
            kube.faults.watch(effect, name="second")
            found = []

            async def follow() -> None:
                async with aclosing(client.watch(PODS, version, silence=0.2)) as watch:
                    async for change in watch:
                        found.append(change.object["metadata"]["name"])

            if error is None:
                await follow()
            else:
                with pytest.raises(error):
                    await follow()
            assert found == ["first"]

    run(life)


def test_a_version_that_is_too_old_is_gone(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            version = str(kube.store.version)
            kube.create("pods", {"metadata": {"name": "one"}})
            kube.store.compact()
            with pytest.raises(Gone):
                await changes(client, version, 1)
            kube.faults.status(410, verb="watch")
            with pytest.raises(Gone):
                await changes(client, str(kube.store.version), 1)

    run(life)


def test_a_watch_that_is_left_closes_its_connection(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            version = str(kube.store.version)
            kube.create("pods", {"metadata": {"name": "one"}})
            await changes(client, version, 1)
            await until(lambda: kube.watches == 0 and kube.connections == 0)

    run(life)


def test_logs_whole_stamped_since_limited_and_followed(kube: FakeKube) -> None:
    kube.create("pods", {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "main"}, {"name": "side"}]}})
    log = kube.log("pod", "main")
    log.write("first\n", at=datetime(2026, 1, 1, tzinfo=UTC))
    log.write("second\n", at=datetime(2026, 1, 2, tzinfo=UTC))

    async def text(client: KubeClient, **asked: Any) -> str:
        return b"".join([chunk async for chunk in client.pod_log("pod", **asked)]).decode()

    async def life() -> None:
        async with client_of(kube) as client:
            with pytest.raises(Invalid, match="a container name must be specified"):
                await text(client)
            assert await text(client, container="main") == "first\nsecond\n"
            assert await text(client, container="main", limit_bytes=8) == "first\nse"
            assert await text(client, container="main", since=datetime(2026, 1, 2, tzinfo=UTC)) == "second\n"
            stamped = await text(client, container="main", timestamps=True)
            assert stamped.splitlines()[0] == "2026-01-01T00:00:00.000000000Z first"
            following = asyncio.create_task(text(client, container="main", follow=True))
            await until(lambda: any("follow=true" in one.target for one in kube.requests))
            log.write("third\n")
            log.end()
            assert await following == "first\nsecond\nthird\n"
            with pytest.raises(Unreachable):
                await text(client, container="side", follow=True, silence=0.1)
            with pytest.raises(NotFound):
                await text(client, container="main", namespace="default")

    run(life)


def test_events_of_one_object_only(kube: FakeKube) -> None:
    one = kube.create("pods", {"metadata": {"name": "one"}})
    two = kube.create("pods", {"metadata": {"name": "two"}})
    kube.note_event(one, "FailedScheduling", "0/3 nodes are available")
    kube.note_event(two, "Pulled", "image is there", kind="Normal")
    kube.note_event(one, "Scheduled", "assigned", kind="Normal")

    async def life() -> None:
        async with client_of(kube) as client:
            found = await client.events(one)
            assert sorted(event["reason"] for event in found) == ["FailedScheduling", "Scheduled"]

    run(life)


def test_a_service_is_reached_through_the_server_and_never_sees_our_token(kube: FakeKube) -> None:
    heard: list[Request] = []

    async def answer(request: Request, exchange: Exchange) -> None:
        heard.append(request)
        await exchange.answer(200, {"you asked for": request.target})

    service = Server(answer)
    kube.create("services", {"metadata": {"name": "head"}})
    kube.serve("head", 8265, ("127.0.0.1", service.port))

    async def life() -> None:
        async with client_of(kube) as client:
            url = client.service_url("head", 8265)
            found = await client.http.post(f"{url}/api/jobs/?page=2", content=b"body")
            assert found.json() == {"you asked for": "/api/jobs/?page=2"}
            assert (await client.http.get(client.service_url("head", 1) + "/")).status_code == 503
            assert (await client.http.get(client.service_url("tail", 8265) + "/")).status_code == 404
            assert (await client.get(SERVICES, "head"))["metadata"]["name"] == "head"

    try:
        run(life)
    finally:
        service.close()
    assert (heard[0].method, heard[0].body, "authorization" in heard[0].headers) == ("POST", b"body", False)


def test_a_secret_that_is_refused_is_not_repeated(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            made = await client.create(SECRETS, {"metadata": {"name": "one"}, "stringData": {"key": "hunter2"}})
            assert made["data"] == {"key": "aHVudGVyMg=="}
            with pytest.raises(Invalid) as refused:
                await client.create(SECRETS, {"metadata": {"name": "two"}, "data": {"hunter2": "hunter2"}})
            assert "hunter2" not in str(refused.value)

    run(life)


def test_messages_are_one_short_line_without_tokens() -> None:
    token = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrOHMifQ"
    said = {"reason": "Forbidden", "message": f"no\nuser \x1b[1m with {token} may " + "x" * 9000, "details": None}
    error = error_of("GET /x", 403, said)
    assert isinstance(error, Forbidden)
    assert token not in error.message
    assert error.message.startswith("GET /x: 403 Forbidden: no user [1m with *** may xxx")
    assert len(error.message) < 500
    assert error_of("GET /x", 502, b"<html>").message == "GET /x: 502 Unknown"
    assert error_of("GET /x", 429, {"details": {"retryAfterSeconds": 7}}).retry_after == 7


def test_something_that_is_no_api_server_is_named(kube: FakeKube) -> None:
    async def answer(request: Request, exchange: Exchange) -> None:
        await exchange.answer(200, b"<html>welcome</html>")

    service = Server(answer)

    async def life() -> None:
        client = KubeClient(Access(f"http://127.0.0.1:{service.port}", "corral", Fixed(Credential())), QUICK)
        with pytest.raises(KubeError, match="is this a Kubernetes API server"):
            await client.get(PODS, "one")
        await client.close()

    try:
        run(life)
    finally:
        service.close()
