"""A service for one run alone, when its end is disturbed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from corral.e2e import local_service
from corral.e2e.local_service import LocalService, Size
from tests.e2e.small import is_gone


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # a child of another test that has ended
        return ""


def disturbed(folder: Path, pids: list[int]) -> None:
    """It stands still, as on a full disk, and whoever waits for its end presses Ctrl-C."""
    with LocalService(folder, Size(1, 1, 1), {}):
        (service,) = (child for child in psutil.Process().children() if str(folder) in words(child))
        service.suspend()
        pids += [service.pid, *(child.pid for child in service.children(recursive=True))]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_signal_while_a_service_does_not_end_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(local_service, "AFTER_SIGNAL", 0.1)
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        disturbed(tmp_path / "service", pids)
    assert pids
    assert all(map(is_gone, pids))
