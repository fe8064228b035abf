"""What KubeRay's operator, the controller of its clusters and a kubelet do with a RayJob, over HTTP like they do.

`NEXT` is the table of a RayJob's states: from each one function that looks at what is there and says what changes. It
is run again and again, as the operator does, so that tests may change anything in between. What the operator does not
do by itself, tests make it do: see the methods of OperatorSimulator.
"""

from __future__ import annotations

import base64
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self, cast

import httpx

from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.containers import Containers, LightContainers, Object, state
from tests.job.backends.kube.faults import Faults
from tests.job.backends.kube.http import Server
from tests.job.backends.kube.routes import Routes

FINALIZER = "ray.io/rayjob-finalizer"
NAME = "ray.io/originated-from-cr-name"
RAY, CORE = "/apis/ray.io/v1", "/api/v1"
TICK = 0.1  # seconds between looks at what tells nobody that it changed


class _Undisturbed:
    """The same API server as the operator sees it: without the faults that are meant for the service."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube, self.faults, self.tokens = kube, Faults(), set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    def note(self, *_: object) -> None:
        """Nobody counts what the operator asks."""


class OperatorSimulator:
    """Runs in a thread of its own until closed. paused: the operator does nothing. keeps_finalizer: it never lets go of
    a RayJob. names_dashboards: as the real one does, by names that only the cluster knows. schedule: what a new pod
    says about itself (its status); {} lets it run. held: deployment states that are not left. seen: states that each
    RayJob went through. clusters: RayClusters made for each RayJob, in order."""

    def __init__(self, kube: FakeKube, containers: Containers | None = None, namespace: str = "corral") -> None:
        self.kube, self.namespace = kube, namespace
        self.containers: Containers = containers or LightContainers()
        self.paused = threading.Event()
        self.keeps_finalizer = False
        self.names_dashboards = False
        self.schedule: Callable[[Object], Object] = lambda pod: {}
        self.held: set[str] = set()
        self.seen: dict[str, list[str]] = {}
        self.clusters: dict[str, list[str]] = {}
        self.trouble: list[BaseException] = []
        self._server = Server(Routes(cast(FakeKube, _Undisturbed(kube))))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._server.port}", timeout=10.0)
        self._started: dict[str, Object] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._woken = threading.Event()
        kube.on_change(self._changed)
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._woken.set()
        self._thread.join(60)
        self.containers.close()
        self._http.close()
        self._server.close()
        if self.trouble:
            raise self.trouble[0]

    # What tests make happen ------------------------------------------------------------------------------------------

    def set_status(self, name: str, **fields: Any) -> None:
        """The operator says so: jobDeploymentStatus, jobStatus, reason, message."""
        with self._lock:
            self._status(self._get(f"{RAY}/{{}}/rayjobs/{name}"), fields)

    def admit(self, name: str, yes: bool = True) -> None:
        """As Kueue does."""
        self.kube.patch("rayjobs", name, {"spec": {"suspend": not yes}}, self.namespace)

    def lose_head(self, name: str) -> None:
        """Its node died: the pod is gone, and the controller of the cluster makes another one."""
        with self._lock:
            for pod in self._pods_of(self.cluster_of(name)):
                if pod["metadata"]["labels"]["ray.io/node-type"] == "head":
                    self._call("DELETE", f"{CORE}/{{}}/pods/{pod['metadata']['name']}")
            self._kubelet()

    def cluster_of(self, name: str) -> str:
        return str(self._get(f"{RAY}/{{}}/rayjobs/{name}")["status"]["rayClusterName"])

    # The loop ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._lock:
                    self._kubelet()
                    if not self.paused.is_set():
                        for rayjob in self._list(f"{RAY}/{{}}/rayjobs"):
                            self._reconcile(rayjob)
                        for cluster in self._list(f"{RAY}/{{}}/rayclusters"):
                            self._make_pods(cluster)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (404, 409):  # changed or gone meanwhile: looked at again
                    self.trouble.append(error)
                    return
            except BaseException as error:
                self.trouble.append(error)
                return
            self._woken.wait(TICK)
            self._woken.clear()

    def _changed(self, what: str, thing: Object) -> None:
        if what == "ADDED" and thing.get("kind") == "RayCluster" and (name := thing["metadata"]["labels"].get(NAME)):
            self.clusters.setdefault(name, []).append(thing["metadata"]["name"])
        self._woken.set()

    def _reconcile(self, rayjob: Object) -> None:
        about, status = rayjob["metadata"], rayjob.get("status") or {}
        if about.get("deletionTimestamp"):
            if not self.keeps_finalizer and FINALIZER in (about.get("finalizers") or []):
                self._stop_job(rayjob)
                left = [one for one in about["finalizers"] if one != FINALIZER]
                self._call("PATCH", f"{RAY}/{{}}/rayjobs/{about['name']}", {"metadata": {"finalizers": left}})
            return
        state = str(status.get("jobDeploymentStatus") or "")
        known = self.seen.setdefault(about["name"], [])
        if known[-1:] != [state]:
            known.append(state)
        if state in self.held or state not in NEXT:
            return
        changes = NEXT[state](self, rayjob)
        if changes:
            self._status(rayjob, changes)

    def _status(self, rayjob: Object, changes: Mapping[str, Any]) -> None:
        if changes.get("jobDeploymentStatus") in ("Complete", "Failed"):
            changes = {"endTime": _now(), **changes}
        path = f"{RAY}/{{}}/rayjobs/{rayjob['metadata']['name']}/status"
        self._call("PATCH", path, {"status": dict(changes)})

    # A RayJob's steps -------------------------------------------------------------------------------------------------

    def _new(self, rayjob: Object) -> Object:
        name, spec = rayjob["metadata"]["name"], rayjob["spec"]
        if FINALIZER not in (rayjob["metadata"].get("finalizers") or []):
            patch = {"metadata": {"finalizers": [*(rayjob["metadata"].get("finalizers") or []), FINALIZER]}}
            self._call("PATCH", f"{RAY}/{{}}/rayjobs/{name}", patch)
        changes = {"jobDeploymentStatus": "Initializing", "startTime": _now()}
        changes["rayClusterName"] = f"{name}-{next(self._numbers):05d}"
        if spec.get("submissionMode") != "InteractiveMode":
            changes["jobId"] = spec.get("jobId") or f"{name}-generated"
        return changes

    def _initializing(self, rayjob: Object) -> Object:
        if rayjob["spec"].get("suspend"):
            return {"jobDeploymentStatus": "Suspending"}
        if late := self._late(rayjob, ("activeDeadlineSeconds", "preRunningDeadlineSeconds")):
            return late
        cluster = self._cluster(rayjob)
        if not self._ready(cluster):
            return {}
        host = self.containers.dashboard(cluster)
        if not host:
            return {}
        interactive = rayjob["spec"].get("submissionMode") == "InteractiveMode"
        named = f"{cluster}-head-svc.{self.namespace}.svc.cluster.local:8265"
        url = named if self.names_dashboards else host
        return {"dashboardURL": url, "jobDeploymentStatus": "Waiting" if interactive else "Running"}

    def _waiting(self, rayjob: Object) -> Object:
        if late := self._late(rayjob, ("preRunningDeadlineSeconds",)):
            return late
        if job := rayjob["spec"].get("jobId"):
            return {"jobId": job, "jobDeploymentStatus": "Running"}
        return {}

    def _running(self, rayjob: Object) -> Object:
        if rayjob["spec"].get("suspend"):
            return {"jobDeploymentStatus": "Suspending"}
        if late := self._late(rayjob, ("activeDeadlineSeconds",)):
            return late
        self._cluster(rayjob)  # one that is gone is made anew, under its name
        status = rayjob["status"]
        host = self.containers.dashboard(status["rayClusterName"])
        try:
            url, headers = f"http://{host}/api/jobs/{status['jobId']}", self._ray_token(rayjob)
            answer = self._http.get(url, headers=headers, timeout=0.5) if host else None
            if answer is None:
                return {}
            if answer.status_code == 404 and rayjob["spec"].get("submissionMode", "") != "InteractiveMode":
                self._submit(rayjob, host)
                return {}
            answer.raise_for_status()
        except httpx.HTTPError:
            return {}
        job = answer.json()
        changes = {"jobStatus": job["status"], "message": job["message"]}
        if job["status"] in ("SUCCEEDED", "STOPPED"):
            changes["jobDeploymentStatus"] = "Complete"
        elif job["status"] == "FAILED":
            changes |= {"jobDeploymentStatus": "Failed", "reason": "AppFailed"}
        return {} if {key: status.get(key) for key in changes} == changes else changes

    def _finished(self, rayjob: Object) -> Object:
        """The cluster goes when its time is over."""
        spec, status = rayjob["spec"], rayjob["status"]
        age = _age(status.get("endTime"))
        if spec.get("shutdownAfterJobFinishes") and age >= spec.get("ttlSecondsAfterFinished", 0):
            self._delete_cluster(status.get("rayClusterName", ""))
        return {}

    def _suspending(self, rayjob: Object) -> Object:
        if not self._delete_cluster(rayjob["status"].get("rayClusterName", "")):
            return {}
        nothing = dict.fromkeys(("rayClusterName", "dashboardURL", "jobId", "message", "reason", "jobStatus"))
        return {**nothing, "jobDeploymentStatus": "Suspended"}

    def _suspended(self, rayjob: Object) -> Object:
        return {} if rayjob["spec"].get("suspend") else {"jobDeploymentStatus": None}

    def _late(self, rayjob: Object, limits: tuple[str, ...]) -> Object:
        for field in limits:
            limit = rayjob["spec"].get(field)
            if limit is not None and _age(rayjob["status"].get("startTime")) > limit:
                reason = "PreRunningDeadlineExceeded" if field.startswith("pre") else "DeadlineExceeded"
                said = f"The RayJob has passed the {field}: {limit}"
                return {"jobDeploymentStatus": "Failed", "reason": reason, "message": said}
        return {}

    def _ray_token(self, rayjob: Object) -> dict[str, str]:
        """Headers that a Ray cluster of this RayJob asks for."""
        asked = rayjob["spec"]["rayClusterSpec"].get("authOptions") or {}
        secret = self._find(f"{CORE}/{{}}/secrets/{asked.get('secretName', '-')}")
        held = (secret or {}).get("data", {}).get("auth_token")
        return {} if held is None else {"Authorization": f"Bearer {base64.b64decode(held).decode()}"}

    def _submit(self, rayjob: Object, host: str) -> None:
        body = {"entrypoint": rayjob["spec"]["entrypoint"], "submission_id": rayjob["status"]["jobId"]}
        body |= {"metadata": rayjob["spec"].get("metadata") or {}, "runtime_env": {}}
        self._http.post(f"http://{host}/api/jobs/", json=body, headers=self._ray_token(rayjob))

    def _stop_job(self, rayjob: Object) -> None:
        status = rayjob.get("status") or {}
        host = self.containers.dashboard(str(status.get("rayClusterName")))
        if host and status.get("jobId") and status.get("jobStatus") not in ("SUCCEEDED", "FAILED", "STOPPED"):
            with suppress(httpx.HTTPError):
                url = f"http://{host}/api/jobs/{status['jobId']}/stop"
                self._http.post(url, headers=self._ray_token(rayjob), timeout=0.5)

    # Clusters and pods ------------------------------------------------------------------------------------------------

    def _cluster(self, rayjob: Object) -> str:
        """The name of the RayJob's cluster, which is made when it is not there."""
        cluster = str(rayjob["status"]["rayClusterName"])
        name = rayjob["metadata"]["name"]
        if self._find(f"{RAY}/{{}}/rayclusters/{cluster}") is None:
            body = {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {
                    "name": cluster,
                    "labels": {**rayjob["metadata"].get("labels", {}), NAME: name},
                    "annotations": rayjob["metadata"].get("annotations", {}),
                    "ownerReferences": [_owner(rayjob)],
                },
                "spec": rayjob["spec"]["rayClusterSpec"],
            }
            self._call("POST", f"{RAY}/{{}}/rayclusters", body)
        return cluster

    def _delete_cluster(self, cluster: str) -> bool:
        if not cluster or self._find(f"{RAY}/{{}}/rayclusters/{cluster}") is None:
            return True
        self._call("DELETE", f"{RAY}/{{}}/rayclusters/{cluster}")
        return False

    def _make_pods(self, cluster: Object) -> None:
        """As many as the groups want; those that ended are replaced."""
        if cluster["metadata"].get("deletionTimestamp"):
            return
        name, spec = cluster["metadata"]["name"], cluster["spec"]
        groups = [("headgroup", "head", 1, spec["headGroupSpec"])]
        for group in spec.get("workerGroupSpecs") or []:
            groups.append((group["groupName"], "worker", group["replicas"], group))
        there = [
            pod for pod in self._list(f"{CORE}/{{}}/pods") if pod["metadata"]["labels"].get("ray.io/cluster") == name
        ]
        for group, kind, wanted, its in groups:
            have = [pod for pod in there if pod["metadata"]["labels"]["ray.io/group"] == group]
            for pod in have:
                if (pod.get("status") or {}).get("phase") == "Failed":
                    self._call("DELETE", f"{CORE}/{{}}/pods/{pod['metadata']['name']}")
            for _ in range(wanted - len(have)):
                self._make_pod(cluster, group, kind, its)
        if self._find(f"{CORE}/{{}}/services/{name}-head-svc") is None:
            about = {"name": f"{name}-head-svc", "ownerReferences": [_owner(cluster)]}
            ports = [{"name": "dashboard", "port": 8265}]
            body = {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {"ports": ports}}
            self._call("POST", f"{CORE}/{{}}/services", body)

    def _make_pod(self, cluster: Object, group: str, kind: str, its: Mapping[str, Any]) -> None:
        template, name = its["template"], cluster["metadata"]["name"]
        middle = "head" if kind == "head" else f"{group}-worker"
        labels = {"ray.io/cluster": name, "ray.io/node-type": kind, "ray.io/group": group}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{middle}-{next(self._numbers):05d}",
                "labels": {**(template.get("metadata") or {}).get("labels", {}), **labels},
                "ownerReferences": [_owner(cluster)],
            },
            "spec": template["spec"],
        }
        self._call("POST", f"{CORE}/{{}}/pods", body)

    def _ready(self, cluster: str) -> bool:
        its = self._find(f"{RAY}/{{}}/rayclusters/{cluster}")
        if its is None:
            return False
        wanted = 1 + sum(group["replicas"] for group in its["spec"].get("workerGroupSpecs") or [])
        pods = [
            pod for pod in self._list(f"{CORE}/{{}}/pods") if pod["metadata"]["labels"].get("ray.io/cluster") == cluster
        ]
        return sum((pod.get("status") or {}).get("phase") == "Running" for pod in pods) >= wanted

    def _kubelet(self) -> None:
        """Start the containers of new pods, heads first, and end those of pods that are gone."""
        pods = self._list(f"{CORE}/{{}}/pods?labelSelector=ray.io/cluster")
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid in [uid for uid in self._started if uid not in there]:
            del self._started[uid]
            self.containers.stop(uid)
        for pod in sorted(pods, key=lambda one: one["metadata"]["labels"]["ray.io/node-type"]):
            uid, phase = pod["metadata"]["uid"], (pod.get("status") or {}).get("phase")
            if uid not in self._started and phase in (None, "Pending"):
                self._start(pod)
            elif uid in self._started and phase != "Failed":
                ready = self.containers.running(pod)
                if self.containers.over(pod):
                    self._pod_status(pod, {"phase": "Failed"})
                elif ready and phase != "Running":
                    self._expose(pod)
                    self._pod_status(pod, {"phase": "Running", "containerStatuses": [state(running={})]})

    def _start(self, pod: Object) -> None:
        status = self.schedule(pod)
        if status:
            if status != pod.get("status"):
                self._pod_status(pod, status)
            return
        cluster = pod["metadata"]["labels"]["ray.io/cluster"]
        its = self._find(f"{RAY}/{{}}/rayclusters/{cluster}")
        head = pod["metadata"]["labels"]["ray.io/node-type"] == "head"
        if its is None or not (head or self.containers.dashboard(cluster)):
            return
        named = pod["metadata"]["labels"]["ray.io/group"]
        groups = {one["groupName"]: one for one in its["spec"].get("workerGroupSpecs") or []}
        group = its["spec"]["headGroupSpec"] if head else groups[named]
        env = self._env(pod)
        if env is None:
            waiting = {"reason": "CreateContainerConfigError", "message": "secret not found"}
            self._pod_status(pod, {"phase": "Pending", "containerStatuses": [state(waiting=waiting)]})
            return
        self.containers.start(pod, group, env)
        self._started[pod["metadata"]["uid"]] = pod

    def _expose(self, pod: Object) -> None:
        """The service of a head that runs leads to its dashboard."""
        cluster = pod["metadata"]["labels"]["ray.io/cluster"]
        if pod["metadata"]["labels"]["ray.io/node-type"] == "head":
            address, _, port = self.containers.dashboard(cluster).rpartition(":")
            self.kube.serve(f"{cluster}-head-svc", 8265, (address, int(port)), self.namespace)

    def _env(self, pod: Object) -> dict[str, str] | None:
        """Of its first container, with the values that Secrets hold; None when one is not there."""
        found = {}
        for one in pod["spec"]["containers"][0].get("env") or []:
            if "valueFrom" not in one:
                found[one["name"]] = one.get("value") or ""
                continue
            reference = one["valueFrom"]["secretKeyRef"]
            secret = self._find(f"{CORE}/{{}}/secrets/{reference['name']}")
            if secret is None or reference["key"] not in secret["data"]:
                return None
            found[one["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        return found

    def _pod_status(self, pod: Object, status: Object) -> None:
        self._call("PATCH", f"{CORE}/{{}}/pods/{pod['metadata']['name']}/status", {"status": status})

    def _pods_of(self, cluster: str) -> list[Object]:
        pods = self._list(f"{CORE}/{{}}/pods")
        return [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("ray.io/cluster") == cluster]

    # HTTP -------------------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Object | None = None) -> Object:
        where = path.format(f"namespaces/{self.namespace}")
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer = self._http.request(method, where, json=body, headers={"Content-Type": kind})
        if method == "DELETE" and answer.status_code == 404:
            return {}
        answer.raise_for_status()
        found: Object = answer.json()
        return found

    def _get(self, path: str) -> Object:
        return self._call("GET", path)

    def _find(self, path: str) -> Object | None:
        try:
            return self._call("GET", path)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404:
                return None
            raise

    def _list(self, path: str) -> list[Object]:
        found: list[Object] = self._call("GET", path)["items"]
        return found


NEXT: dict[str, Callable[[OperatorSimulator, Object], Object]] = {
    "": OperatorSimulator._new,
    "Initializing": OperatorSimulator._initializing,
    "Waiting": OperatorSimulator._waiting,
    "Running": OperatorSimulator._running,
    "Complete": OperatorSimulator._finished,
    "Failed": OperatorSimulator._finished,
    "Suspending": OperatorSimulator._suspending,
    "Suspended": OperatorSimulator._suspended,
}


def _owner(thing: Object) -> Object:
    about = thing["metadata"]
    return {
        "apiVersion": thing["apiVersion"],
        "kind": thing["kind"],
        "name": about["name"],
        "uid": about["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age(stamp: str | None) -> float:
    return time.time() - datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
