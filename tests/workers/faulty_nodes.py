"""Nodes that are not as they should be: each of its own processes, environment, and, where asked for, namespaces.

`python -m tests.workers.faulty_nodes SPEC` runs one node until its stdin ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

OBJECT_STORE = 80 << 20


def start(
    stack: ExitStack, name: str, devices: int, temp_dir: Path, address: str | None = None, *, ip: str = "127.0.0.2",
    env: dict[str, str] | None = None, prefix: Sequence[str] = (),
) -> Callable[[], str]:  # fmt: skip
    """A node of the cluster at `address`; without one the head of a new cluster. Ended with the stack.

    prefix: words before the command, as `ip netns exec NAME`. env: added to the node's environment. Returns a function
    that gives the address of the cluster once the node is up, so that several can start at the same time.
    """
    spec = {"name": name, "devices": devices, "temp_dir": str(temp_dir), "address": address, "ip": ip}
    said = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.workers.faulty_nodes", json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
        cwd=Path(__file__).parents[2], env=os.environ | (env or {}), start_new_session=True,
    )  # fmt: skip
    stack.callback(_end, process)

    def up() -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("address "):
                return line.split()[1]
        said.seek(0)
        raise AssertionError(f"{name} did not start: {said.read().decode()[-2000:]}")

    return up


def _end(process: subprocess.Popen[str]) -> None:
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in below:
        if each.is_running():
            each.kill()
    process.stdout.close()


def main(spec: dict[str, Any]) -> None:
    from corral.workers.node_starter import SETTINGS

    os.environ.update(SETTINGS)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class QuietNode(Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            return

    parameters = RayParams(
        num_cpus=spec["devices"], num_gpus=0, resources={}, gcs_address=spec["address"], node_ip_address=spec["ip"],
        node_name=spec["name"], object_store_memory=OBJECT_STORE, temp_dir=spec["temp_dir"],
        include_dashboard=False, include_log_monitor=False, no_monitor=True,
    )  # fmt: skip
    running = QuietNode(parameters, head=spec["address"] is None, shutdown_at_exit=False, spawn_reaper=False)
    print("address", running.gcs_address, flush=True)
    sys.stdin.read()
    for child in psutil.Process().children(recursive=True):
        child.send_signal(signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
