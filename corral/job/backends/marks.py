"""Processes of a submission, found by a variable that all of them inherit, whatever session or parent they moved to.

Only processes with the mark, and those below them, are ever signalled; a pid alone says nothing, as pids come again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "CORRAL_JOB_SUBMISSION"
# Processes that rename themselves (Ray's do) overwrite their environment unless this is set.
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
_LOOK = 0.05  # seconds between looks at processes that are on their way out


def started(pid: int) -> str | None:
    """What tells this process from a later one of the same pid; None when it is gone (a zombie is).

    On Linux the boot and the kernel's own ticks since then, as times of day move with the system's clock.
    """
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
        except psutil.NoSuchProcess:
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{_boot()}/{fields[19]}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def marks(prefix: str) -> Iterator[tuple[psutil.Process, str]]:
    """Every process whose mark starts with `prefix`, and the mark."""
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            mark = process.environ().get(MARK, "")
            if mark.startswith(prefix) and process.status() != psutil.STATUS_ZOMBIE:
                yield process, mark
        except psutil.Error:
            continue  # gone meanwhile, a zombie, or another user's


def marked(mark: str) -> list[psutil.Process]:
    return [process for process, its in marks(mark) if its == mark]


def with_descendants(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Also those below them that dropped the mark from their environment."""
    found = {process.pid: process for process in processes}
    for process in processes:
        with suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    found.pop(os.getpid(), None)
    return list(found.values())


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Signal each; one that is gone, or whose pid is another process by now, is left alone."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def await_gone(mark: str, seconds: float) -> bool:
    """Whether nothing with the mark is left within so many seconds."""
    end = time.monotonic() + seconds
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def kill_all(mark: str, seconds: float) -> list[psutil.Process]:
    """SIGKILL until nothing is left, as a process may fork while its parent is killed; what is left after `seconds`."""
    end = time.monotonic() + seconds
    while left := marked(mark):
        if time.monotonic() > end:
            return left
        every = with_descendants(left)
        send(every, signal.SIGKILL)
        psutil.wait_procs(every, timeout=_LOOK)
    return []
