"""The collectives of one rank over the job's own backend, with known values, and its exchanges with single peers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from corral.engine.distributed import device_of
from corral.engine.rank import Rank
from corral.workers.pair_judgement import Speed

PART = 16  # numbers that a rank alone contributes
PINGS = 2
REPEATS = 2
MIB = 1 << 20


def values(owner: int, receiver: int, count: int = PART) -> Tensor:
    """What `owner` contributes for `receiver`: [count] whole numbers in float32, small enough for exact sums."""
    return ((torch.arange(count) * 31 + owner * 7 + receiver * 13) % 1021 + 1).float()


def all_reduce(rank: Rank) -> list[int]:
    """Sum over all ranks of vectors [world * PART], of which part r is not zero on rank r only, then of full ones.

    Returns the ranks whose contribution is wrong; -1 stands for a sum that is wrong without any of the parts being so.
    """
    parts = torch.zeros(rank.world, PART)
    parts[rank.rank] = values(rank.rank, 0)
    full = values(rank.rank, 0, 1024)
    sums = torch.cat([parts.flatten(), full]).to(device_of(rank))
    dist.all_reduce(sums)
    got = sums.cpu()
    wrong = [r for r in range(rank.world) if not torch.equal(got[r * PART : (r + 1) * PART], values(r, 0))]
    expected = sum((values(r, 0, 1024) for r in range(rank.world)), torch.zeros(1024))
    return wrong or ([] if torch.equal(got[rank.world * PART :], expected) else [-1])


def all_to_all(rank: Rank) -> list[int]:
    """Every rank sends PART numbers to every rank. Returns the ranks from which the wrong ones came."""
    sent = torch.cat([values(rank.rank, to) for to in range(rank.world)]).to(device_of(rank))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    got = received.cpu().view(rank.world, PART)
    return [r for r in range(rank.world) if not torch.equal(got[r], values(r, rank.rank))]


def broadcast(rank: Rank, roots: Sequence[int]) -> list[int]:
    """Each root in turn sends PART numbers to all. Returns the roots from which the wrong ones came."""
    wrong = []
    for root in roots:
        mine = values(root, 1) if rank.rank == root else torch.zeros(PART)
        got = mine.to(device_of(rank))
        dist.broadcast(got, root)
        if not torch.equal(got.cpu(), values(root, 1)):
            wrong.append(root)
    return wrong


class Exchanges:
    """Sends `mib` MiB to a peer and receives as much, again and again, and measures how long that takes."""

    def __init__(self, rank: Rank, mib: float) -> None:
        self._rank, self._device, self._mib = rank, device_of(rank), mib
        # float32: every backend has it
        self._sent = torch.full((int(mib * MIB) // 4,), float(rank.rank), dtype=torch.float32, device=self._device)
        self._received = torch.zeros_like(self._sent)

    def speed(self, peer: int) -> tuple[Speed, bool]:
        """The best of a few, each begun when both are there, and whether what came was what the peer sends."""
        self._swap(peer, 1)
        latency = min(self._swap(peer, 1) for _ in range(PINGS))
        seconds = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            self._swap(peer, self._sent.numel())
            self._swap(peer, 1)  # what was sent may still be in a buffer here; the peer's answer shows that it is there
            seconds = min(seconds, time.perf_counter() - start)
        intact = bool((self._received == float(peer)).all())
        return Speed(latency, self._mib / seconds), intact

    def _swap(self, peer: int, size: int) -> float:
        start = time.perf_counter()
        operations = [
            dist.P2POp(dist.irecv, self._received[:size], peer),
            dist.P2POp(dist.isend, self._sent[:size], peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if self._device.type != "cpu":  # there, a wait is only put into the stream
            torch.get_device_module(self._device.type).synchronize()
        return time.perf_counter() - start
