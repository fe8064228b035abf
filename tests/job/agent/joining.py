"""Agents that join: started as Ray starts them, and what they say on their standard output, read as a service would."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.job.protocol.agent import BOARDING, TOKEN, AgentSpec, Boarding, EndRecord, Heartbeat
from corral.job.protocol.frames import Bytes, parse
from tests.job.agent.service import RecordingService

NAME = "rj-0123456789ab-a1"


def boarding(service: RecordingService, root: Path, command: list[str], **given: Any) -> Boarding:
    """given: fields of the spec, and of the boarding itself."""
    outside = {name: given.pop(name) for name in list(given) if name in Boarding.model_fields}
    fields: dict[str, Any] = {
        "job_id": "rj-0123456789ab",
        "attempt": 1,
        "submission_id": NAME,
        "service_url": service.url,
        "token": "",
        "command": command,
        "cwd": ".",
        "nodes": 1,
        "devices_per_node": 1,
    }
    return Boarding(**({"spec": AgentSpec(**(fields | given)), "root": str(root), "join": False} | outside))


def with_source(service: RecordingService, archive: bytes) -> dict[str, Any]:
    """Fields of a boarding whose source is this archive."""
    service.source = archive
    return {"bundle": hashlib.sha256(archive).hexdigest(), "cwd": "source", "join": True}


class Joining:
    """An agent whose standard output is a file, as Ray has it."""

    def __init__(self, boarding: Boarding, output: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.output = Path(boarding.root) / boarding.spec.submission_id, output
        told = {BOARDING: boarding.encode(), TOKEN: "token-of-the-agent"}
        self._env = (
            told | {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | dict(env or {})
        )
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "corral.job.agent.join"],
                env=self._env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, seconds: float = 30.0) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        """With all that it started."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    # What it said ---------------------------------------------------------------------------------------------------

    def said(self) -> str:
        return self.output.read_bytes().decode()

    def frames(self) -> list[Bytes | Heartbeat | EndRecord]:
        return [found for line in self.said().split("\n") if (found := parse(line)) is not None]

    def readable(self) -> list[str]:
        return [line for line in self.said().splitlines() if not line.startswith("#corral ")]

    def ends(self) -> list[EndRecord]:
        return [found for found in self.frames() if isinstance(found, EndRecord)]

    def pieces(self) -> list[Bytes]:
        return [found for found in self.frames() if isinstance(found, Bytes)]

    def framed(self, beyond: Mapping[str, int]) -> dict[str, bytes]:
        """What follows these watermarks of the sources without a gap."""
        found = dict.fromkeys({piece.source for piece in self.pieces()} | set(beyond), b"")
        starts = defaultdict(int, beyond)
        for piece in self.pieces():
            at = starts[piece.source] + len(found[piece.source])
            if piece.start <= at < piece.start + len(piece.content):
                found[piece.source] += piece.content[at - piece.start :]
        return found


def told_to_end(agent: Joining) -> None:
    """As Ray tells it: everything that belongs to the job at once."""
    os.killpg(agent.process.pid, signal.SIGTERM)
