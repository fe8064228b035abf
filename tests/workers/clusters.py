"""What tests of local nodes and launchers share: waiting for facts, and looking at processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from corral.config.plan import Topology

BOUND = 60.0  # seconds; generous, as the machine may be busy


def until(fact: Callable[[], bool], bound: float = BOUND) -> None:
    """Return as soon as `fact` holds; fail when it does not within the bound."""
    end = time.monotonic() + bound
    while not fact():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids]


def all_gone(watched: list[psutil.Process], bound: float = BOUND) -> bool:
    """Whether all end (by pid and start time) within the bound; a zombie has ended."""
    end = time.monotonic() + bound
    while any(_runs(process) for process in watched):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(run_dir: Path, rank: int, method: str) -> bool:
    """Whether the rank's progress file says that it is inside this method."""
    path = run_dir / "progress" / f"rank-{rank}.json"
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    return (record["method"], record["state"]) == (method, "running")


def topology(nnodes: int, devices: int, address: str | None, device: str = "cpu") -> Topology:
    return Topology(device, nnodes, devices, "ray", address)
