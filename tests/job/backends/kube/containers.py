"""What runs the containers of pods, and what pods say about themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from tests.job.backends.kube.dashboard import FakeDashboard

Object = dict[str, Any]


class Containers(Protocol):
    """What runs the containers of pods. Each method is called from the simulator's thread."""

    def start(self, pod: Object, group: Mapping[str, Any], env: Mapping[str, str]) -> None: ...

    def running(self, pod: Object) -> bool:
        """Whether it has come up."""

    def over(self, pod: Object) -> bool:
        """Whether it ended by itself."""

    def stop(self, uid: str) -> None: ...

    def dashboard(self, cluster: str) -> str:
        """HOST:PORT, "" while there is none."""

    def close(self) -> None: ...


class LightContainers:
    """Heads are fake dashboards, workers nothing but lines in what those say of nodes."""

    def __init__(self, *, runs: bool = True, token: str = "") -> None:
        self.heads: dict[str, FakeDashboard] = {}  # by RayCluster
        self.every: list[FakeDashboard] = []
        self._runs, self._token = runs, token
        self._pods: dict[str, tuple[str, dict[str, Any] | None]] = {}

    def start(self, pod: Object, group: Mapping[str, Any], env: Mapping[str, str]) -> None:
        cluster, uid = pod["metadata"]["labels"]["ray.io/cluster"], pod["metadata"]["uid"]
        head = pod["metadata"]["labels"]["ray.io/node-type"] == "head"
        if head:
            self.heads[cluster] = FakeDashboard(env, runs=self._runs, token=self._token)
            self.every.append(self.heads[cluster])
        node = {
            "node_id": uid,
            "node_name": pod["metadata"]["name"],
            "node_ip": "10.0.0.1",
            "state": "ALIVE",
            "is_head_node": head,
            "resources_total": resources_of(group["rayStartParams"]),
        }
        self.heads[cluster].nodes.append(node)
        self._pods[uid] = cluster, node

    def running(self, pod: Object) -> bool:
        return True

    def over(self, pod: Object) -> bool:
        return False

    def stop(self, uid: str) -> None:
        cluster, node = self._pods.pop(uid, ("", None))
        if node is None or cluster not in self.heads:
            return
        if node["is_head_node"]:
            self.heads.pop(cluster).close()
        else:
            node["state"] = "DEAD"

    def dashboard(self, cluster: str) -> str:
        return f"127.0.0.1:{self.heads[cluster].port}" if cluster in self.heads else ""

    def close(self) -> None:
        for head in self.heads.values():
            head.close()


def resources_of(params: Mapping[str, str]) -> dict[str, float]:
    """What `ray start` makes of rayStartParams."""
    found: dict[str, float] = {"CPU": float(params.get("num-cpus", 1))}
    if "num-gpus" in params:
        found["GPU"] = float(params["num-gpus"])
    if "resources" in params:
        found |= json.loads(json.loads(params["resources"]))
    return {name: count for name, count in found.items() if count}


def unschedulable(message: str) -> Object:
    """The status of a pod that no node takes."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def unpullable(image: str) -> Object:
    """The status of a pod whose image is not there."""
    waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
    return {"phase": "Pending", "containerStatuses": [state(waiting=waiting)]}


def state(**state: Any) -> Object:
    return {"name": "ray", "image": "", "ready": "running" in state, "restartCount": 0, "state": state}
