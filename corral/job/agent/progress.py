"""What the ranks say of themselves in progress/rank-R.json, and what their processes show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from corral.job.agent.output import read_regular
from corral.job.protocol.agent import RankProgress

MOST_RANKS, MOST_SUSPECTS = 4096, 64  # limits of a heartbeat
LARGEST = 1 << 14  # bytes of a progress file
LONGEST_WORD = 64  # characters of a state or method
_STANDING = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "stopped by a tracer"}
_GONE = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


@dataclass(frozen=True)
class Standing:
    """total: sum of all counters; None when the command keeps none."""

    ranks: list[RankProgress]
    total: int | None
    suspects: list[str]


def standing(run: Path, same_host: bool) -> Standing:
    """Half-written and foreign files are left out. same_host: whether a pid of a rank is one of this machine."""
    ranks: list[RankProgress] = []
    suspects: list[str] = []
    for path in sorted((run / "progress").glob("rank-*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            said = read_regular(path, 0, LARGEST)
            rank = RankProgress.model_validate_json(said)  # from JSON: refuses half a surrogate pair
            pid = json.loads(said).get("pid")
        except (ValueError, RecursionError):
            continue
        if not (0 <= rank.calls < 1 << 53 and 0 <= rank.rank < 10**5 and 0 <= rank.node < 10**4):
            continue
        if not math.isfinite(rank.time):
            continue
        rank = rank.model_copy(update={"state": rank.state[:LONGEST_WORD], "method": rank.method[:LONGEST_WORD]})
        ranks.append(rank)
        if same_host and type(pid) is int and pid > 0 and (state := _state(pid)):
            suspects.append(f"node-{rank.node} rank {rank.rank} (pid {pid}) is {state}, {_place(rank)}")
    suspects += _behind(ranks)
    total = sum(rank.calls for rank in ranks) if ranks else None
    return Standing(ranks[:MOST_RANKS], total, suspects[:MOST_SUSPECTS])


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks run on this machine: there is no cluster, or one on a loopback address."""
    return environ.get("RAY_ADDRESS", "127.").startswith("127.")


def _state(pid: int) -> str | None:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return None
    return "gone" if status in _GONE else _STANDING.get(status)


def _behind(ranks: list[RankProgress]) -> list[str]:
    most = max((rank.calls for rank in ranks), default=0)
    fewest = min((rank.calls for rank in ranks), default=0)
    return [
        f"node-{rank.node} rank {rank.rank} is at call {rank.calls} of {most}, {rank.state} {_place(rank)}"
        for rank in ranks
        if rank.calls == fewest < most
    ]


def _place(rank: RankProgress) -> str:
    return f"in {rank.method}" if rank.method else "before any call"
