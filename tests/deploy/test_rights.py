"""The service's rights are those that it uses, all of them and no other: what an API server saw it do is compared with
its Roles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.job.backends.base import Presence
from corral.job.backends.identity import service_id
from corral.job.backends.kuberay.backend import KubeRayBackend
from corral.job.backends.kuberay.manifest import MANAGED_BY
from corral.job.backends.kuberay.pods import SERVICE, SUBMISSION
from tests.deploy.manifests import FOLDER, the
from tests.job.backends.contract import ONE, ended, until, until_presence
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.http import Request
from tests.job.backends.kube.routes import Call
from tests.job.backends.kuberay import place
from tests.job.backends.kuberay.place import Kubernetes_, kubernetes

WHO = "Bearer service"
METHODS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
Right = tuple[str, str, str]  # group, resource, verb


class Watched(FakeKube):
    """Knows what the service asked for. The operator shows no token."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[Right] = set()

    def note(self, request: Request, call: Call | None) -> None:
        super().note(request, call)
        if call is not None and request.headers.get("authorization") == WHO:
            verb = METHODS[request.method] if call.verb in ("proxy", "log") else call.verb
            self.used.add((call.kind.group, call.resource, verb))


def granted(name: str, folder: Path = FOLDER) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in the("Role", name, folder)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def behind_the_api_server(kube: FakeKube, change: str, thing: dict[str, Any]) -> None:
    """Ray's dashboards have the names of services, which only the API server reaches."""
    url = (thing.get("status") or {}).get("dashboardURL") or ""
    if thing.get("kind") == "RayJob" and change != "DELETED" and url.startswith("127."):
        service = f"{thing['status']['rayClusterName']}-head-svc"
        kube.serve(service, 8265, ("127.0.0.1", int(url.rpartition(":")[2])))
        kube.set_status("rayjobs", thing["metadata"]["name"], {"dashboardURL": f"{service}.corral.svc:8265"})


async def life(it: Kubernetes_, kube: Watched, backend: KubeRayBackend) -> None:
    """A job that ends by itself, one that is stopped, and what an earlier life of the service left."""
    first, second = it.place.spec("echo done"), it.place.spec("echo began; sleep 60", attempt=2)
    labels = {MANAGED_BY: "corral", SERVICE: service_id(it.settings.data_dir.resolve())}

    def left(plural: str, kind: str, version: str, submission_id: str, name: str) -> None:
        about = {"name": name, "labels": {**labels, SUBMISSION: submission_id}}
        kube.create(plural, {"apiVersion": version, "kind": kind, "metadata": about})

    left("secrets", "Secret", "v1", first.submission_id, first.submission_id)
    it.operator.schedule = lambda pod: {"phase": "Pending"}
    await backend.provision(first, ONE)

    async def says_why_it_waits() -> bool:
        await backend.observe(first.submission_id)
        return ("", "events", "list") in kube.used

    await until(says_why_it_waits)
    it.operator.schedule = lambda pod: {}
    await ended(backend, first.submission_id)
    await backend.fetch(first.submission_id, {})
    await backend.destroy(first.submission_id)

    await backend.provision(second, ONE)
    await until_presence(backend, second.submission_id, Presence.ACTIVE)
    await backend.stop(second.submission_id, 2.0)
    await until_presence(backend, second.submission_id, Presence.ENDED)
    await backend.destroy(second.submission_id)

    it.operator.paused.set()
    left("pods", "Pod", "v1", second.submission_id, "orphan")
    left("rayclusters", "RayCluster", "ray.io/v1", second.submission_id, "orphan")
    assert await backend.list_owned() == [second.submission_id]
    await backend.destroy(second.submission_id)
    it.nothing_left()


@pytest.mark.parametrize("dashboard", ["service", "proxy"])
def test_the_rights_are_those_that_are_used(dashboard, tmp_path, monkeypatch):
    monkeypatch.setattr(place, "FakeKube", Watched)
    with kubernetes(tmp_path, dashboard=dashboard) as it:
        kube = it.kube
        assert isinstance(kube, Watched)
        if dashboard == "proxy":
            kube.on_change(lambda change, thing: behind_the_api_server(kube, change, thing))
        config = kube.kubeconfig(tmp_path / "service", user={"token": WHO.split()[1]})
        it.settings = replace(it.settings, kubernetes=replace(it.settings.kubernetes, kubeconfig=config))
        it.run(lambda: life(it, kube, it.make()))
        wanted = granted("corral") | (granted("corral-dashboards", FOLDER / "proxy") if dashboard == "proxy" else set())
        assert kube.used == wanted
