"""`progress/rank-R.json`: what a rank is doing, for whoever watches a run."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from corral import atomic


class Progress:
    """Writes one small file, atomically, at the start and the end of every method call.

    Raises InfraError when it cannot be written.
    """

    def __init__(self, run_dir: Path, node: int, rank: int) -> None:
        self.path = run_dir / "progress" / f"rank-{rank}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._node, self._rank = node, rank
        self._calls, self._peak = 0, 0.0

    def start(self, method: str) -> None:
        self._calls += 1
        self._write(method, "running")

    def end(self, method: str, state: str) -> None:
        """`state`: idle after success, failed after an exception."""
        self._write(method, state)

    def _write(self, method: str, state: str) -> None:
        self._peak = max(self._peak, peak_memory_gib())  # the kernel counts in batches, so a later answer may be lower
        record = {"rank": self._rank, "node": self._node, "pid": os.getpid(), "method": method}
        record |= {"calls": self._calls, "state": state, "time": time.time(), "peak_memory_gib": self._peak}
        atomic.write_text(self.path, json.dumps(record) + "\n")


def peak_memory_gib() -> float:
    """Most memory of the machine that this process had at a time, with what it shares with others.

    Linux tells it of the program alone; what getrusage tells there includes the process that started it.
    """
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / (1 << 20)  # kiB
    unit = 1 if sys.platform == "darwin" else 1 << 10  # bytes, of what the system counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
