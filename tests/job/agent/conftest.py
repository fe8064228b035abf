"""Attempts in temporary folders, and agents as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.job.protocol.agent import AgentSpec, EndRecord
from tests.job.agent.service import RecordingService


@pytest.fixture
def service() -> Iterator[RecordingService]:
    running = RecordingService()
    yield running
    running.stop()


MakeSpec = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, service: RecordingService) -> MakeSpec:
    """Writes spec.json for a command and returns the folder of the attempt."""

    def attempt(*command: str, **given: Any) -> Path:
        folder = tmp_path / "attempt-1"
        folder.mkdir()
        fields: dict[str, Any] = {
            "job_id": "rj-0123456789ab",
            "attempt": 1,
            "submission_id": "rj-0123456789ab-a1",
            "service_url": service.url,
            "token": service.token,
            "command": list(command),
            "cwd": ".",
            "nodes": 2,
            "devices_per_node": 4,
        }
        (folder / "spec.json").write_text(AgentSpec(**(fields | given)).model_dump_json())
        return folder

    return attempt


Start = Callable[[Path], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an agent; it is killed at the end of the test when it still runs."""
    started: list[subprocess.Popen[bytes]] = []

    def agent(folder: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "corral.job.agent", str(folder)])
        started.append(process)
        return process

    yield agent
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def end_of(folder: Path) -> EndRecord:
    """The end record on the disk, which has to be whole."""
    record = EndRecord.model_validate_json((folder / "end.json").read_bytes())
    assert record.is_whole()
    return record
