"""Which process of the world this is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """Rank order is by node, then by device. `master` is "host:port" of the rendezvous; None in a world of one."""

    rank: int = 0
    world: int = 1
    node: int = 0
    local_rank: int = 0
    device: str = "cpu"  # cpu | cuda | npu
    master: str | None = None
