"""What the operator makes of rayStartParams, given to a real `ray start`: ports and resources are the manifest's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.job.backends.kuberay.jobs import made, placement, settings

BOUND = 180.0
LAB = "extends: ascend-a2\nhost_network: true\ncpu: '2'\nray_start_params: {object-store-memory: '90000000'}\n"


class Host:
    """Where all pods' processes are: one network, as with hostNetwork."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="cp")  # short: Ray puts sockets below it
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, params: Mapping[str, str], *more: str) -> None:
        """As KubeRay does it: options pasted into a line of shell."""
        options = " ".join(f"--{name}={value}" for name, value in params.items())
        line = f"exec ray start {options} {' '.join(more)} --block --include-log-monitor=false"
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        null = subprocess.DEVNULL
        self._started.append(
            subprocess.Popen(["bash", "-c", line], env=env, stdout=null, stderr=null, start_new_session=True)
        )

    def end(self) -> None:
        for signum, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for process in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
            for process in self._started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def host() -> Iterator[Host]:
    it = Host()
    try:
        yield it
    finally:
        it.end()


def until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            if found := look():
                return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {BOUND:g} s")


@pytest.mark.slow
def test_a_head_and_a_node_share_a_host_on_the_ports_of_one_job(host, tmp_path):
    (tmp_path / "lab.yaml").write_text(LAB)
    cluster = made(1, 4, settings(tmp_path, profile="lab"), placement(head="separate"))["spec"]["rayClusterSpec"]
    head, node = cluster["headGroupSpec"]["rayStartParams"], cluster["workerGroupSpecs"][0]["rayStartParams"]
    dashboard = f"http://127.0.0.1:{head['dashboard-port']}"
    host.start(head, "--head", f"--temp-dir={host.folder}")
    until(lambda: httpx.get(f"{dashboard}/api/version").json()["ray_version"], "the dashboard is where the service is")
    host.start(node, f"--address=127.0.0.1:{head['port']}")

    def both() -> list[dict[str, Any]] | None:
        found = httpx.get(f"{dashboard}/api/v0/nodes").json()["data"]["result"]["result"]
        return found if len(found) == 2 and all(each["state"] == "ALIVE" for each in found) else None

    held = {each["is_head_node"]: each["resources_total"] for each in until(both, "the node joins its head")}
    assert (held[False]["CPU"], held[False]["NPU"]) == (2.0, 4.0)
    assert not {"CPU", "NPU", "GPU"} & held[True].keys(), "a head of its own has nothing to place a rank on"
    for params in (head, node):  # what the operator's probes ask
        url = f"http://127.0.0.1:{params['dashboard-agent-listen-port']}/api/local_raylet_healthz"
        assert until(lambda url=url: httpx.get(url).text, "the agent of the node answers") == "success"
