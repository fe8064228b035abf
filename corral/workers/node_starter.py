"""Start the Ray processes of N nodes on this machine, write where the head is, and leave.

One interpreter starts all of them through Ray's node class: `ray start` costs one interpreter and one import of Ray per
node. The processes stay behind as children of the supervisor, which adopts orphans. Ports are chosen by the kernel when
each process binds, so that clusters side by side never clash; only the head's port can be asked for.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

OBJECT_STORE = 100 << 20  # bytes per node
STARTED = "started.json"
HEAD = "head"  # name of a head that is none of the nodes
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
"""Address of all nodes. Ray replaces 127.0.0.1 by the host's outside address, but not this one."""

SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",  # a worker process per CPU would be started for nothing
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",  # a dead node is noticed in seconds
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill node hosts for the memory of ranks
}


@dataclass(frozen=True)
class NodesSpec:
    """`resource` is what a device counts as: CPU, GPU or the name of a custom resource. port 0: any. head: shared, the
    first of the nodes is the head; separate, a further node without devices, which is named "head"."""

    nodes: int
    devices: int
    resource: str
    temp_dir: str
    port: int = 0
    head: Literal["shared", "separate"] = "shared"

    def names(self) -> list[str]:
        """Of all nodes in the order of their start, the head first."""
        named = [f"node-{index}" for index in range(self.nodes)]
        return [HEAD, *named] if self.head == "separate" else named

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(argv: list[str]) -> None:
    spec = NodesSpec(**json.loads(argv[1]))
    os.environ.update(SETTINGS)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class QuietNode(Node):  # type: ignore[misc]
        """A node without the dashboard's server: an interpreter of its own, which nobody here asks anything."""

        def start_api_server(self, **_: Any) -> None:
            return

    address = None
    for index, name in enumerate(spec.names()):
        parameters = RayParams(
            **_devices(spec, name),
            gcs_address=address,
            gcs_server_port=spec.port if index == 0 else None,
            node_ip_address=LOOPBACK,
            node_name=name,
            object_store_memory=OBJECT_STORE,
            temp_dir=spec.temp_dir,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
        )
        node = QuietNode(parameters, head=index == 0, shutdown_at_exit=False, spawn_reaper=False)
        address = node.gcs_address
    part = Path(spec.temp_dir) / (STARTED + ".part")
    part.write_text(json.dumps({"address": address}))
    part.replace(part.with_name(STARTED))
    sys.stdout.flush()
    os._exit(0)  # Ray's exit handlers would end what was started


def _devices(spec: NodesSpec, name: str) -> dict[str, Any]:
    if name == HEAD:
        return {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    cpus = spec.devices if spec.resource == "CPU" else (os.cpu_count() or 1)
    gpus = spec.devices if spec.resource == "GPU" else 0
    custom = {} if spec.resource in ("CPU", "GPU") else {spec.resource: spec.devices}
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": custom}


if __name__ == "__main__":
    main(sys.argv)
