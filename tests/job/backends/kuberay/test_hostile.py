"""What others do to a job's objects, or have in the same namespace: nothing of ours is left, and nothing of theirs is
touched. What a server says when it does not want a job."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve

from corral.errors import InfraError
from corral.job.backends.kuberay.client import KubeClient
from corral.job.backends.kuberay.dashboard import Dashboards
from corral.job.backends.kuberay.errors import error_of
from corral.job.protocol.frames import data_frames
from corral.job.protocol.states import JobState
from corral.job.service.settings import Kubernetes
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.store import Kind, Object, Refused
from tests.job.backends.kuberay.incident import scene
from tests.job.backends.kuberay.place import FAST, Kubernetes_, kubernetes


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        yield cluster


def refuses(it: Kubernetes_, status: int, reason: str, message: str) -> Callable[[Kind, Object], None]:
    """Each new RayJob, until what is returned is taken off again."""

    def check(kind: Kind, thing: Object) -> None:
        if kind.plural == "rayjobs" and "status" not in thing:
            raise Refused(status, reason, message)

    it.kube.store.checks.append(check)
    return check


# Removing ------------------------------------------------------------------------------------------------------------


def test_a_pod_that_stays_is_waited_for_and_named(it: Kubernetes_) -> None:
    """As on a node that no longer answers: its devices are not free, so the job is not said to be gone."""

    async def life() -> None:
        async with scene(it, bounds=replace(FAST, removal=0.3)) as at:
            await at.runs()
            (pod,) = it.kube.objects("pods")
            it.kube.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": ["example.com/slow"]}})
            with pytest.raises(InfraError, match=f"pod {pod['metadata']['name']} .*example.com/slow"):
                await at.backend.destroy(at.name)
            it.kube.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": []}})
            await at.backend.destroy(at.name)
            it.nothing_left()

    asyncio.run(life())


def test_two_services_in_one_namespace_leave_each_other_alone(it: Kubernetes_) -> None:
    """Also when both were asked for the same job, which then has the same name."""
    kinds = ("rayjobs", "rayclusters", "pods", "secrets")

    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            there = {kind: [one["metadata"]["uid"] for one in it.kube.objects(kind)] for kind in kinds}
            it.settings = replace(it.settings, data_dir=it.folder / "other")
            it.settings.data_dir.mkdir()
            async with scene(it) as other:
                await other.submit()
                assert other.name == at.name
                await other.world.ends(other.job)
                verdict = other.world.job(other.job).verdict
                assert verdict is not None
                assert verdict.failure_class == "config"
                assert "this service did not make it" in verdict.message
                assert await other.backend.list_owned() == []
                await other.backend.destroy(at.name)
                await other.world.runner._attempts.reap()
            assert there == {kind: [one["metadata"]["uid"] for one in it.kube.objects(kind)] for kind in kinds}
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


def test_a_secret_that_somebody_deletes_before_the_pods_start_is_made_again(it: Kubernetes_) -> None:
    it.operator.paused.set()
    it.kube.faults.status(503, verb="patch", resource="secrets", times=60)

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            await at.until(lambda: it.kube.find("rayjobs", at.name), "the RayJob is there")
            it.kube.delete("secrets", at.name)
            it.kube.faults.clear()
            it.operator.paused.clear()
            await at.is_in("Running", "RUNNING")
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


# Secrets -------------------------------------------------------------------------------------------------------------


def test_what_is_secret_is_in_the_secret_alone(it: Kubernetes_, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in other objects nor in what the service logs, tells of the job, or would print for people."""
    caplog.set_level(logging.DEBUG)

    async def life() -> None:
        async with scene(it) as at:
            it.kube.faults.cut_answer(verb="create", resource="secrets")
            await at.runs()
            (secret,) = it.kube.objects("secrets")
            held = list(secret["data"].values())
            plain = [at.world.runner._attempts._token_for(at.job)]
            others = [it.kube.objects(kind) for kind in ("rayjobs", "rayclusters", "pods", "services", "events")]
            shown = json.dumps(others) + caplog.text + json.dumps(at.world.events(at.job), default=str)
            shown += (await at.backend.observe(at.name)).message + json.dumps(at.head.jobs[at.name].submission)
            assert plain[0] in at.head.env.values()
            for text in (*held, *plain, *(one for one in at.head.env.values() if len(one) > 200)):
                assert len(text) > 20
                assert text not in shown
            await at.agent_says(0)
            await at.over()

    asyncio.run(life())


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason"), [(403, "Forbidden"), pytest.param(400, "BadRequest", marks=pytest.mark.slow)]
)
def test_a_webhooks_no_is_about_the_job_and_said_as_it_said_it(it: Kubernetes_, status: int, reason: str) -> None:
    words = 'admission webhook "policy.example.com" denied the request: images come from registry.example/ci only'
    refuses(it, status, reason, words)

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class) == ("FAILED", "config")
            assert words in verdict.message
            assert "rights" not in verdict.message

    asyncio.run(life())


def test_a_quota_is_waited_for(it: Kubernetes_) -> None:
    check = refuses(it, 403, "Forbidden", "exceeded quota: jobs, requested: 1, used: 9, limited: 9")

    async def life() -> None:
        async with scene(it) as at:
            await at.submit()
            refused = it.kube.count("create", "rayjobs")
            await at.until(lambda: it.kube.count("create", "rayjobs") > refused + 1)
            assert at.world.job(at.job).state is JobState.PROVISIONING
            it.kube.store.checks.remove(check)
            await at.is_in("Running", "RUNNING")
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


def test_a_server_without_rayjobs_says_nothing_about_a_job(it: Kubernetes_) -> None:
    """While KubeRay is updated, or an API server starts, it answers 404 to all of them."""

    async def life() -> None:
        async with scene(it) as at:
            await at.runs()
            it.kube.faults.status(404, resource="rayjobs", times=None)
            at.backend._cluster.rayjobs._objects.clear()  # as after a start of the service
            with pytest.raises(InfraError, match="404"):
                await at.backend.observe(at.name)
            assert (await at.lets_pass(5.0)).state is JobState.RUNNING
            it.kube.faults.clear()
            at.backend._cluster.rayjobs._list_at = 0.0
            await at.agent_says(0)
            assert (await at.over()).status == "SUCCEEDED"

    asyncio.run(life())


def test_a_look_does_not_wait_for_a_server_that_hangs(it: Kubernetes_, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.job.backends.kuberay.cluster.LOOK_UP", 0.2)

    async def life() -> None:
        it.kube.faults.hang(times=None)
        backend = it.make()
        with pytest.raises(InfraError, match="the API server does not say what there is of rj-0123456789ab-a1"):
            await backend.observe("rj-0123456789ab-a1")
        it.kube.faults.clear()

    it.run(life)


def test_many_that_wait_ask_for_events_once(it: Kubernetes_) -> None:
    """There is one list for a whole namespace. The first attempt is not told what was noted about the tenth."""

    async def life() -> None:
        for name in ("rj-0123456789ab-a1", "rj-0123456789ab-a10"):
            it.kube.note_event(
                {"kind": "RayJob", "metadata": {"name": name, "namespace": "corral", "uid": name}}, "Odd", name
            )
        cluster = it.make()._cluster
        cluster._share_events = 60.0
        found = await asyncio.gather(*(cluster.events_of("rj-0123456789ab-a1") for _ in range(50)))
        assert {event["message"] for events in found for event in events} == {"rj-0123456789ab-a1"}
        assert it.kube.count("list", "events") == 1

    it.run(life)


# Through the API server ----------------------------------------------------------------------------------------------


def test_dashboards_through_the_api_server_with_tokens_of_both(it: Kubernetes_) -> None:
    """The API server gets its own token, Ray gets Ray's, and neither sees the other's."""
    it.containers._token = "token-of-ray"
    (it.folder / "token").write_text("token-of-ray\n")
    it.kube.tokens = {"token-of-kubernetes"}
    it.operator.names_dashboards = True
    config = it.kube.kubeconfig(it.folder / "kubeconfig")

    async def life() -> None:
        async with scene(it, dashboard="proxy", token_file=it.folder / "token", kubeconfig=config) as at:
            await at.runs()
            job = at.head.jobs[at.name]
            job.log.write_text("\n".join([*data_frames("driver", 0, b"one line\n"), ""]))
            job.exit_code, job.status = 3, "FAILED"
            await at.backend.fetch(at.name, {})
            folder = at.backend.attempt_dir(at.name)
            assert folder is not None
            assert (folder / "driver.log").read_text() == "one line\n"
            verdict = await at.over()
            assert (verdict.status, verdict.failure_class, verdict.exit_code) == ("FAILED", "user", 3)

    asyncio.run(life())
    assert it.kube.count("proxy") > 3
    assert {one.authorization for one in it.kube.requests} == {"Bearer token-of-kubernetes"}


def test_the_log_socket_goes_through_the_api_server_too(tmp_path: Path) -> None:
    """Which it lets pass for whoever shows a token of its own; Ray's is passed on beside that."""
    (tmp_path / "token").write_text("token-of-ray\n")
    seen: list[tuple[str, str | None]] = []

    async def says(socket: ServerConnection) -> None:
        assert socket.request is not None
        seen.append((socket.request.path, socket.request.headers.get("X-Ray-Authorization")))
        await socket.send("line\n")

    async def life(kube: FakeKube) -> list[str]:
        settings = Kubernetes(
            kubeconfig=kube.kubeconfig(tmp_path / "config"), dashboard="proxy", token_file=tmp_path / "token"
        )
        client = KubeClient.from_settings(settings)
        async with serve(says, "127.0.0.1", 0) as server:
            kube.create("services", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "head"}})
            kube.serve("head", 8265, server.sockets[0].getsockname())
            api = Dashboards(settings, client).of(
                "rj-0", {"status": {"dashboardURL": "head.corral.svc.cluster.local:8265"}}
            )
            assert api is not None
            with pytest.raises(InfraError):  # REST is not spoken there, and who we are is known from then on
                await api.get("rj-0")
            found = [text async for text in api.tail("rj-0")]
        await client.close()
        return found

    with FakeKube(tokens=["token-of-kubernetes"]) as kube:
        assert asyncio.run(life(kube)) == ["line\n"]
        assert seen[-1] == ("/api/jobs/rj-0/logs/tail", "Bearer token-of-ray")
        assert {one.authorization for one in kube.requests} == {"Bearer token-of-kubernetes"}


@pytest.mark.parametrize(
    ("status", "words", "said"),
    [
        (404, 'namespaces "nowhere" not found', True),
        (403, 'secrets is forbidden: User "corral" cannot create resource "secrets"', True),
        (403, 'secrets "rj-0-a1" is forbidden: exceeded quota: few, requested: count/secrets=1', True),
        (403, 'admission webhook "w" denied the request: the value hunter2 of token is weak', False),
        (422, 'Secret "x" is invalid: data[token]: Invalid value: "hunter2"', False),
        (400, "the body hunter2 cannot be decoded", False),
    ],
)
def test_what_a_server_says_of_a_secret_is_told_when_it_holds_no_value(status: int, words: str, said: bool) -> None:
    error = error_of("POST secrets", status, {"reason": "Any", "message": words}, quiet=True)
    assert (words in str(error)) is said
    assert "hunter2" not in str(error)
