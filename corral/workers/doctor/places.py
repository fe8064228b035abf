"""Where the checks run: in this process, or in one small actor on each node of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from corral.config.plan import Topology
from corral.platform import instead
from corral.workers.doctor.asked import Asked
from corral.workers.doctor.probe import Probe
from corral.workers.local_cluster import LocalCluster
from corral.workers.placement import in_order
from corral.workers.ray_launcher import connect

POLL = 0.2  # seconds between looks at the cluster


@dataclass(frozen=True)
class Place:
    """One node. number: in the order of the run. devices: as Ray counts them; None where nobody does.
    others: accelerators that it has instead, see platform.instead."""

    number: int
    name: str
    address: str
    devices: int | None
    others: str = ""


class Places(Protocol):
    """The nodes of a run, in order."""

    places: list[Place]

    def ask(self, method: str, args: Mapping[int, tuple[Any, ...]], bound: float) -> dict[int, Any]:
        """Call a method of the probe on the nodes that have arguments, at the same time. An answer that did not come
        within `bound` seconds, or an error, is a `Silent`."""


@dataclass(frozen=True)
class Silent:
    """Why a node did not answer."""

    why: str


class ThisMachine:
    """No cluster: the checks of one node, in this process."""

    def __init__(self) -> None:
        self.places = [Place(0, "this machine", "127.0.0.1", None)]
        self._probe = Probe()

    def ask(self, method: str, args: Mapping[int, tuple[Any, ...]], bound: float) -> dict[int, Any]:
        return {number: getattr(self._probe, method)(*each) for number, each in args.items()}


class RayNodes:
    """An actor on each node. It holds no devices, so a cluster that is busy can be examined too."""

    def __init__(self, asked: Asked) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resource = asked.platform.ray_resource
        nodes = _chosen(asked, resource)
        self.places = [_place(number, node, resource) for number, node in enumerate(nodes)]
        _send_code_along()
        actor = ray.remote(Probe)
        self._probes = [
            actor.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in nodes
        ]

    def ask(self, method: str, args: Mapping[int, tuple[Any, ...]], bound: float) -> dict[int, Any]:
        import ray

        refs = {number: getattr(self._probes[number], method).remote(*each) for number, each in args.items()}
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=bound) if refs else ([], [])
        ready = set(done)
        return {
            number: self._answer(ref) if ref in ready else Silent(f"no answer in {bound:g} s")
            for number, ref in refs.items()
        }

    def _answer(self, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            return Silent(f"{type(error.cause).__name__}: {error.cause}")
        except ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return Silent(lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}")


@contextmanager
def cluster_of(topology: Topology, asked: Asked) -> Iterator[Topology]:
    """Local nodes, where the topology needs some, for the length of the block; the topology with their address."""
    if topology.launcher == "in_process" or topology.ray_address is not None:
        yield topology
        return
    nodes, devices = topology.nnodes, topology.devices_per_node
    with LocalCluster.start(nodes, devices, asked.platform.ray_resource) as cluster:
        yield replace(topology, ray_address=cluster.address)


@contextmanager
def places_of(topology: Topology, asked: Asked) -> Iterator[Places]:
    """The nodes of a topology whose cluster is there. Raises InfraError when it cannot be joined."""
    if topology.ray_address is None:
        yield ThisMachine()
        return
    import ray

    try:
        connect(topology.ray_address, asked.wait)
        yield RayNodes(asked)
    finally:
        ray.shutdown()


def _chosen(asked: Asked, resource: str) -> list[dict[str, Any]]:
    """The nodes that have what was asked for; where they are too few, all that have any of it; nodes may still join."""
    import ray

    end = time.monotonic() + asked.wait
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        some = [node for node in alive if node["Resources"].get(resource, 0) >= 1] or alive
        if len(some) >= (asked.nodes or 1) or time.monotonic() > end:
            break
        time.sleep(POLL)
    able = [node for node in some if node["Resources"].get(resource, 0) >= (asked.devices or 1)]
    return in_order(able if asked.nodes is not None and len(able) >= asked.nodes else some)


def _place(number: int, node: dict[str, Any], resource: str) -> Place:
    has = node["Resources"]
    devices, others = int(has.get(resource, 0)), instead(has, resource)
    return Place(number, node["NodeName"], node["NodeManagerAddress"], devices, others)


def _send_code_along() -> None:
    """The probe goes to the nodes by value: what is installed there is what is examined, not what examines."""
    from ray import cloudpickle

    import corral.manifest
    import corral.workers.doctor.probe
    import corral.workers.doctor.reach
    import corral.workers.interfaces

    sent = (corral.manifest, corral.workers.doctor.probe, corral.workers.doctor.reach, corral.workers.interfaces)
    for module in sent:
        cloudpickle.register_pickle_by_value(module)
