"""Which nodes of a Ray cluster a run gets: wait for them, reserve them, put them in order."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from corral.config.plan import Topology
from corral.engine.rank import Rank
from corral.errors import ConfigError, InfraError
from corral.platform import instead, platform

POLL = 0.5  # seconds between looks at the cluster


@dataclass(frozen=True)
class PlacedNode:
    """A node of the run, in node order; `bundle` is its index in the placement group."""

    name: str
    node_id: str
    ip: str
    bundle: int


def reserve(nnodes: int, devices: int, device: str, wait: float) -> tuple[Any, list[PlacedNode]]:
    """A placement group of `devices` on each of `nnodes` nodes, and the nodes by name.

    Raises InfraError when the cluster does not offer them within `wait` seconds, saying what it has.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    resource = platform(device).ray_resource
    end = time.monotonic() + wait
    while len(_able(resource, devices)) < nnodes:
        if time.monotonic() >= end:
            raise InfraError(_too_small(nnodes, devices, resource, wait))
        time.sleep(POLL)
    group = placement_group([{resource: float(devices)}] * nnodes, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=max(end - time.monotonic(), POLL)):
        remove_placement_group(group)
        raise InfraError(_too_busy(nnodes, devices, resource, wait))
    by_id = {node["NodeID"]: node for node in _alive()}
    where: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    placed = [
        PlacedNode(by_id[node_id]["NodeName"], node_id, by_id[node_id]["NodeManagerAddress"], bundle)
        for bundle, node_id in where.items()
    ]
    return group, sorted(placed, key=lambda node: (_natural(node.name), node.node_id))


def listens(address: str) -> bool:
    """Whether something accepts connections at "host:port" now."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def await_listener(address: str, wait: float) -> None:
    """Return once something accepts connections at "host:port". Ray itself would retry for minutes, noisily.

    Raises InfraError when nothing does within `wait` seconds, ConfigError when the address has another form.
    """
    if address == "auto":  # Ray finds the cluster of this machine, or says at once that there is none
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"RAY_ADDRESS={address}: expected HOST:PORT of the head node, for example 10.0.0.1:6379")
    end = time.monotonic() + wait
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(end - time.monotonic(), POLL)).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise InfraError(
                    f"no Ray cluster at {address} after {wait:g} s ({error}); check RAY_ADDRESS, or unset it to start "
                    "local nodes"
                ) from None
            time.sleep(POLL)


def in_order(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of `ray.nodes()` in the order in which a run numbers them."""
    return sorted(nodes, key=lambda node: (_natural(node["NodeName"]), node["NodeID"]))


def make_ranks(topology: Topology, master: str) -> list[Rank]:
    """All ranks by node, then by device; a world of one has no master."""
    size = topology.devices_per_node
    where = master if topology.world > 1 else None
    return [
        Rank(number, topology.world, number // size, number % size, topology.device, where)
        for number in range(topology.world)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """node-2 before node-10, 10.0.0.9 before 10.0.0.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _able(resource: str, devices: int) -> list[dict[str, Any]]:
    return [node for node in _alive() if node["Resources"].get(resource, 0) >= devices]


def _found(resource: str) -> str:
    each = [node["Resources"] for node in _alive()]
    kinds = Counter((int(has.get(resource, 0)), instead(has, resource)) for has in each)
    parts = [
        f"{count} node{'s' * (count > 1)} with {devices} {resource}{others}"
        for (devices, others), count in sorted(kinds.items())
    ]
    return ", ".join(parts) or "no node"


def _too_small(nnodes: int, devices: int, resource: str, wait: float) -> str:
    import ray

    address = ray.get_runtime_context().gcs_address
    return (
        f"found {_found(resource)} after {wait:g} s; need {nnodes} x {devices} {resource} (trainer.nnodes x "
        f"trainer.n_gpus_per_node); add a node with `ray start --address {address}`, or ask for less"
    )


def _too_busy(nnodes: int, devices: int, resource: str, wait: float) -> str:
    import ray

    free = int(ray.available_resources().get(resource, 0))
    return (
        f"found {_found(resource)}, but only {free} {resource} in all are free after {wait:g} s; need {nnodes} x "
        f"{devices} on different nodes: wait for the other job, or end it"
    )
