"""One rank's part in the collective check: come, join, take every step, report, and hear what was found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from corral.engine.distributed import connect, device_of
from corral.engine.rank import Rank
from corral.findings import Finding
from corral.platform import platform
from corral.workers import collective_probe as probe
from corral.workers.collective_host import Bounds, Host, shared, wait_for
from corral.workers.collective_reports import STEPS, Report
from corral.workers.pair_judgement import TRIES, Speed
from corral.workers.pair_schedule import peers, schedule
from corral.workers.reachability import Door, unreachable
from corral.workers.watched import Watched

RESULT = "collective.json"
AGAIN = 4  # times as much is sent when a pair is measured again
REACH = 2.0  # seconds for plain connections to all other ranks
WAIT = 1.0  # seconds between two looks at whether somebody hangs


class _Halted(Exception):
    """Somebody else hangs, so that what this rank waits for will not come."""


class Part:
    """nodes[r]: the node of rank r. facts: what has to be the same on all ranks, beside what is known here."""

    def __init__(self, rank: Rank, nodes: Sequence[int], run_dir: Path, facts: dict[str, str], bounds: Bounds) -> None:
        self._rank, self._nodes, self._run_dir, self._bounds = rank, nodes, run_dir, bounds
        self._facts = _facts(rank) | facts
        self._host: Host | None = None
        self._pass = "report"
        self._found: list[Finding] | None = None

    def findings(self) -> list[Finding]:
        """What rank 0 has found in the reports of all. Never hangs: a rank 0 that does not answer is a finding too."""
        work = Watched(self._work, self._bounds.step)
        if self._failed(work) and work.step in STEPS:
            step, peer, error = work.step, work.peer, _line(work.error)
            work = Watched(lambda then: self._tell(then, step, peer, error), self._bounds.step)
        if self._failed(work):
            return [_unheard(work, self._rank, self._nodes, self._bounds)]
        assert self._found is not None
        return self._found

    def _failed(self, work: Watched) -> bool:
        """Whether it hangs, or torch raised. Any other error is raised here."""
        ended = work.finished()
        if self._host is not None and self._host.error is not None:
            raise self._host.error
        if work.error is not None and not isinstance(work.error, RuntimeError):
            raise work.error
        return not ended or work.error is not None

    # In the thread --------------------------------------------------------------------------------------------------

    def _work(self, watched: Watched) -> None:
        watched.enter("reach", bound=self._bounds.arrive)
        store = shared(self._rank)
        me = self._rank.rank
        if me == 0:
            self._host = Host(self._rank, self._nodes, self._run_dir / RESULT, self._bounds)
        door = Door(str(self._rank.master))
        store.set(f"door/{me}", json.dumps(door.address))
        store.set(f"facts/{me}", json.dumps(self._facts))
        try:
            if self._await(watched, store, "arrived"):
                store.set(f"report/{me}", self._first(watched).to_json())
                for number in range(TRIES):
                    self._pass = f"try-{number}"
                    if not (pairs := self._await(watched, store, f"again/{number}")):
                        break
                    store.set(f"{self._pass}/{me}", self._again(watched, store, json.loads(pairs)).to_json())
        except _Halted:
            store.set(f"{self._pass}/{me}", Report().to_json())
        self._hear(watched, store)
        door.close()

    def _tell(self, watched: Watched, step: str, peer: int | None, error: str) -> None:
        """Over a connection of its own, as the one of the thread that hangs may be held by it."""
        watched.enter("wait")
        store = shared(self._rank)
        others = [rank for rank in range(self._rank.world) if rank != self._rank.rank]
        doors = {rank: json.loads(store.get(f"door/{rank}")) for rank in others} if step == "connect" else {}
        closed = unreachable({rank: tuple(door) for rank, door in doors.items()}, REACH)
        report = Report(stuck=step, peer=peer, error=error, unreachable=closed)
        store.set(f"{self._pass}/{self._rank.rank}", report.to_json())
        self._hear(watched, store)

    def _hear(self, watched: Watched, store: Store) -> None:
        told = json.loads(self._await(watched, store, "result", halts=False))
        self._found = self._host.findings if self._host else [Finding.from_dict(fields) for fields in told]

    def _await(self, watched: Watched, store: Store, name: str, *, halts: bool = True) -> str:
        """A value that another rank will set. That may take any time, as long as rank 0 answers."""
        watched.enter("wait")
        while not wait_for(store, [name], WAIT):
            watched.enter("wait")
            if self._host is not None and self._host.error is not None:
                raise self._host.error
            if halts and store.check(["halt"]):
                raise _Halted
        value: bytes = store.get(name)
        return value.decode()

    def _first(self, watched: Watched) -> Report:
        rank = self._rank
        watched.enter("connect")
        connect(rank)
        leaders = [first for first, node in enumerate(self._nodes) if self._nodes.index(node) == first]
        checks: list[tuple[str, Callable[[], list[int]]]] = [
            ("all_reduce", lambda: probe.all_reduce(rank)),
            ("all_to_all", lambda: probe.all_to_all(rank)),
            ("broadcast", lambda: probe.broadcast(rank, leaders)),
        ]
        took: dict[str, float] = {}
        wrong: dict[str, list[int]] = {}
        for name, check in checks:
            watched.enter(name)
            start = time.perf_counter()
            wrong[name] = check()
            took[name] = round(time.perf_counter() - start, 4)
        exchanges = probe.Exchanges(rank, platform(rank.device).probe)
        speeds: dict[int, Speed] = {}
        for peer in peers(schedule(self._nodes), rank.rank):
            watched.enter("pair", peer)
            speed, intact = exchanges.speed(peer)
            if rank.rank < peer:
                speeds[peer] = speed
            if not intact:
                wrong.setdefault("pair", []).append(peer)
        return Report(took=took, wrong=wrong, speeds=speeds)

    def _again(self, watched: Watched, store: Store, pairs: Sequence[Sequence[int]]) -> Report:
        """Each pair alone, in turn: the next one begins when the one before it has said that it is done."""
        exchanges = probe.Exchanges(self._rank, AGAIN * platform(self._rank.device).probe)
        speeds: dict[int, Speed] = {}
        for number, (a, b) in enumerate(pairs):
            if self._rank.rank not in (a, b):
                continue
            if number:
                self._await(watched, store, f"{self._pass}/done/{number - 1}")
            peer = b if self._rank.rank == a else a
            watched.enter("pair", peer)
            speed, _ = exchanges.speed(peer)
            if self._rank.rank == a:
                speeds[b] = speed
                store.set(f"{self._pass}/done/{number}", "")
        return Report(speeds=speeds)


def _facts(rank: Rank) -> dict[str, str]:
    """What a mixed-up cluster has several of. Compute types and the like come from the plan."""
    device = rank.device
    if device != "cpu":
        device += f" ({torch.get_device_module(rank.device).get_device_name(device_of(rank))})"
    return {
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "backend": platform(rank.device).backend,
        "device": device,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _line(error: BaseException | None) -> str:
    """What torch says, without its own stack."""
    return str(error).strip().splitlines()[0][:300] if str(error or "").strip() else ""


def _unheard(work: Watched, rank: Rank, nodes: Sequence[int], bounds: Bounds) -> Finding:
    """Rank 0 holds the store; without it nobody else can be asked."""
    error = _line(work.error) or "none"
    if work.step == "reach":
        return Finding(
            "reach", False, f"an answer of rank 0 at {rank.master} within {bounds.arrive:g} s", error,
            f"look at logs/node-0/rank-0.log, and whether node-{rank.node} can connect to that address",
            node=rank.node, rank=rank.rank,
        )  # fmt: skip
    return Finding(
        "answer", False, f"an answer within {bounds.step:g} s to rank {rank.rank}", error,
        "look at logs/node-0/rank-0.log: it hangs or was stopped", node=nodes[0], rank=0,
    )  # fmt: skip
