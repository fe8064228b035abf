"""The process group and the meshes of one rank. A world of one has none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from corral.engine.device import require
from corral.engine.rank import Rank
from corral.engine.sequence_parallel import SequenceParallel
from corral.errors import ConfigError
from corral.platform import platform

TIMEOUT = timedelta(minutes=30)
"""Of one collective. A dead peer is noticed by the launcher, within seconds; this bounds what nobody else notices."""


@dataclass(frozen=True)
class Parallel:
    """Where a rank stands for one model: dp_rank = rank // sp, sp_rank = rank % sp.

    mesh: the flat world, over which parameters are sharded; None in a world of one. sequence: the ranks that share this
    rank's rows; None when sp is 1.
    """

    rank: int
    world: int
    sp: int
    mesh: DeviceMesh | None
    sequence: SequenceParallel | None

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp


def device_of(rank: Rank) -> torch.device:
    """This rank's device. Launchers may show a process all devices of its node or only its own.

    Raises ConfigError, with what was looked for, when torch cannot use such a device here.
    """
    require(rank.device)
    facts = platform(rank.device)
    if facts.device_files is None:
        return torch.device(facts.device)
    count = torch.get_device_module(rank.device).device_count()
    return torch.device(rank.device, rank.local_rank if rank.local_rank < count else 0)


@cache
def rendezvous(rank: Rank) -> Store:
    """The store of the world, which lives in rank 0; a rank does not wait for the others to come.

    Raises torch's DistNetworkError when it cannot be reached, after TIMEOUT.
    """
    if rank.master is None:
        raise ValueError(f"rank {rank.rank} of {rank.world} was given no master address")
    host, port = rank.master.rsplit(":", 1)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"), int(port), rank.world, is_master=rank.rank == 0, timeout=TIMEOUT, wait_for_workers=False
    )


def connect(rank: Rank) -> None:
    """Join the process group of the world, once per process; every rank calls it. Nothing to do in a world of one."""
    if rank.world == 1:
        return
    device = device_of(rank)
    if device.type != "cpu":  # of the calling thread, so before the question whether another one has connected
        module = torch.get_device_module(device)
        module.set_device(device)
        module.init()  # a mesh that finds the device type not started would choose a device itself
    if dist.is_initialized():
        return
    dist.init_process_group(
        platform(rank.device).backend,
        store=PrefixStore("world", rendezvous(rank)),
        rank=rank.rank,
        world_size=rank.world,
        timeout=TIMEOUT,
    )


@cache
def parallel(rank: Rank, sp: int) -> Parallel:
    """The meshes for sequence parallelism of degree `sp`; made once per degree, by all ranks in the same order.

    ConfigError: sp does not divide the world.
    """
    if rank.world % sp:
        raise ConfigError(f"ulysses_sequence_parallel_size={sp} does not divide the {rank.world} devices")
    if rank.world == 1:
        return Parallel(rank=0, world=1, sp=1, mesh=None, sequence=None)
    connect(rank)
    kind = device_of(rank).type
    mesh = init_device_mesh(kind, (rank.world,), mesh_dim_names=("world",))
    sequence = None
    if sp > 1:
        grid = init_device_mesh(kind, (rank.world // sp, sp), mesh_dim_names=("dp", "sp"))
        sequence = SequenceParallel(grid.get_group("sp"), sp)
    return Parallel(rank=rank.rank, world=rank.world, sp=sp, mesh=mesh, sequence=sequence)
