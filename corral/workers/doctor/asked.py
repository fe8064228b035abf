"""What is asked of the nodes, and what they answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corral.platform import Platform, platform


@dataclass(frozen=True)
class Asked:
    """nodes, devices: None: as many as there are. device: cpu, cuda or npu. source_digest: of `manifest_digest`. All
    paths are absolute. wanted: see node_env.wanted_of. Seconds: clock_skew between nodes; wait for nodes to join;
    answer of a node to one question."""

    nodes: int | None
    devices: int | None
    device: str
    run_dir: str
    script: str | None = None
    paths: tuple[str, ...] = ()
    source: str | None = None
    source_digest: str | None = None
    ports: tuple[int, ...] = ()
    shm_mib: int = 64
    disk_mib: int = 1024
    clock_skew: float = 5.0
    wait: float = 20.0
    answer: float = 30.0
    wanted: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform(self) -> Platform:
        return platform(self.device)

    def for_probe(self) -> dict[str, Any]:
        """Plain values, with the facts of the platform that are needed on a node."""
        facts = self.platform
        return asdict(self) | {"device_files": facts.device_files, "visible_devices": facts.visible_devices}


@dataclass(frozen=True)
class Space:
    """Of the file system of a folder, in bytes."""

    folder: str
    total: int
    free: int
    writable: bool

    @classmethod
    def of(cls, raw: dict[str, Any] | None) -> Space | None:
        return None if raw is None else cls(**raw)


@dataclass(frozen=True)
class NodeFacts:
    """Digests that begin with "!" say why there is none. unreadable: path to reason. device_files: None where devices
    have none. ports, own_name: a text is a reason. interfaces: name to addresses with the length of their network."""

    host: str
    python: str
    packages: dict[str, str]
    corral: str | None
    source: str | None
    unreadable: dict[str, str]
    shm: Space | None
    disk: dict[str, Space]
    memory: dict[str, int]
    device_files: int | None
    visible: str | None
    ports: dict[int, str]
    own_name: list[str] | str
    interfaces: dict[str, list[str]]
    variables: dict[str, str]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> NodeFacts:
        disk = {name: space for name, each in raw["disk"].items() if (space := Space.of(each)) is not None}
        return cls(**(raw | {"shm": Space.of(raw["shm"]), "disk": disk}))


@dataclass(frozen=True)
class SeenNode:
    """A node and what it answered. number: in the order of the run. devices: as Ray counts them, logical ones where
    there is no cluster (None: not counted). skew: seconds its clock is ahead of ours, known to within `blur`.
    others: accelerators that it has instead, see platform.instead."""

    number: int
    name: str
    address: str
    devices: int | None
    facts: NodeFacts
    skew: float = 0.0
    blur: float = 0.0
    others: str = ""
