"""Containers that are real: `ray start` for each pod, with the resources and the environment that its manifest says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.job.backends.kube.containers import Object
from tests.job.backends.ray_jobs.head import PORTS, STARTED, Head, _block

# Where this machine's name leads to loopback, nodes find each other there all the same: they are on one host.
ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}


class RealContainers:
    """Ray nodes on this machine: a head with its dashboard for each RayCluster, and one node for each worker pod. They
    come up in threads of their own and end with their pods. trouble: of heads that did not come up."""

    def __init__(self) -> None:
        self.heads: dict[str, Head] = {}
        self.trouble: list[BaseException] = []
        self._up: dict[str, threading.Event] = {}  # by pod
        self._head_up: dict[str, threading.Event] = {}  # by RayCluster
        self._cluster: dict[str, tuple[str, bool]] = {}
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._next_block = 0

    def start(self, pod: Object, group: Mapping[str, Any], env: Mapping[str, str]) -> None:
        labels, uid = pod["metadata"]["labels"], pod["metadata"]["uid"]
        cluster, is_head = labels["ray.io/cluster"], labels["ray.io/node-type"] == "head"
        env = {**env, **ONE_HOST}
        self._up[uid] = threading.Event()
        self._cluster[uid] = cluster, is_head
        cpus, options = options_of(group["rayStartParams"])
        if is_head:
            temp = Path(tempfile.mkdtemp(prefix="kr", dir="/tmp"))
            ports = _block() + 4 * PORTS * self._next_block
            self._next_block += 1
            mark = f"{os.getpid()}-{temp.name}"
            self.heads[cluster] = Head(f"http://127.0.0.1:{ports + 1}", temp, ports, mark, dict(env))
            self._head_up[cluster] = threading.Event()
            what = (self._start_head, (self.heads[cluster], uid, cluster, cpus, options))
        else:
            number = 1 + sum(one == (cluster, False) for one in self._cluster.values())
            what = (self._start_worker, (cluster, uid, pod, number, cpus, options, dict(env)))
        threading.Thread(target=what[0], args=what[1], daemon=True).start()

    def running(self, pod: Object) -> bool:
        return self._up[pod["metadata"]["uid"]].is_set()

    def over(self, pod: Object) -> bool:
        return False

    def stop(self, uid: str) -> None:
        cluster, is_head = self._cluster.pop(uid, ("", False))
        if is_head and cluster in self.heads:
            head = self.heads.pop(cluster)
            head.stop()
            shutil.rmtree(head.temp, ignore_errors=True)
        elif (process := self._workers.pop(uid, None)) is not None:
            _end(process)

    def dashboard(self, cluster: str) -> str:
        up = cluster in self.heads and self._head_up[cluster].is_set()
        return self.heads[cluster].address.removeprefix("http://") if up else ""

    def close(self) -> None:
        for uid in list(self._cluster):
            self.stop(uid)
        if self.trouble:
            raise self.trouble[0]

    def _start_head(self, head: Head, uid: str, cluster: str, cpus: int, options: list[str]) -> None:
        try:
            head.start(cpus, *options)
        except BaseException as error:
            if self.heads.get(cluster) is head:
                self.trouble.append(error)
            return
        self._head_up[cluster].set()
        self._up[uid].set()

    def _start_worker(
        self, cluster: str, uid: str, pod: Object, number: int, cpus: int, options: list[str], env: dict[str, str]
    ) -> None:
        head = self.heads.get(cluster)
        if head is not None and self._head_up[cluster].wait(STARTED):
            name = pod["metadata"]["name"]
            its = replace(head, env=env)
            self._workers[uid] = its.add_node(name, number, "--num-cpus", str(cpus), *options)
            self._up[uid].set()


def options_of(params: Mapping[str, str]) -> tuple[int, list[str]]:
    """CPUs, and the other resources as options of `ray start`; hosts and ports are this machine's own affair."""
    options = ["--num-gpus", params["num-gpus"]] if "num-gpus" in params else []
    if "resources" in params:  # quoted once more for the operator's shell
        options += ["--resources", json.dumps(json.loads(json.loads(params["resources"])))]
    return int(params.get("num-cpus", 1)), options


def _end(process: subprocess.Popen[bytes]) -> None:
    """The node, all of it."""
    with suppress(psutil.Error):
        its = psutil.Process(process.pid)
        every = [*its.children(recursive=True), its]
        for one in every:
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)
    process.wait(10)
