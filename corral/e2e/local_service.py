"""A job service for one run alone: `corral serve` as a child, on a free port, with all its data in the run folder.

What holds when things go wrong:
- The service ends, and cancels its jobs first, when its standard input ends: whatever kills the runner, also kill -9.
- When the service itself was killed, its data is served once more, by a service that adopts the jobs and cancels them.
- When both are killed at once, a job goes on until its command ends; nothing else of it is left then.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from corral.errors import InfraError
from corral.exits import Terminated

START = 60.0  # seconds until the service says where it is
END = 90.0  # seconds until it has cancelled what still runs, and has ended
AFTER_SIGNAL = 10.0  # seconds of those that are left after a signal to us: CI kills what does not end soon
_UNSEEN = ("CORRAL_DATABASE_URL", "CORRAL_SERVICE_DIR", "CORRAL_TOKEN", "CORRAL_TOKEN_FILE", "CORRAL_URL")


@dataclass(frozen=True)
class Size:
    """The most of one job: nodes, devices of a node, devices. Jobs run one after the other."""

    nodes: int
    devices_per_node: int
    devices: int


class LocalService:
    """A context manager. url: where it is, inside. keep: leave its data where it is at the end.

    secrets: values by name, for jobs that name them.
    """

    def __init__(self, folder: Path, size: Size, secrets: Mapping[str, str]) -> None:
        self.folder = folder
        self.url = ""
        self.keep = False
        self._size, self._secrets = size, secrets
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises InfraError when the service does not come up."""
        try:
            self._write_secrets()
            self._child = self._start()
            self.url = _said(self._child, self._log)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            shutil.rmtree(self.folder / "secrets", ignore_errors=True)
            if not self.keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self.folder / "service.log"

    def _start(self) -> subprocess.Popen[bytes]:
        size = self._size
        options: dict[str, object] = {
            "--port": 0,
            "--data-dir": self.folder / "data",
            "--devices": size.devices,
            "--max-nodes": size.nodes,
            "--max-devices-per-node": size.devices_per_node,
        }
        if self._secrets:
            options["--secrets-dir"] = self.folder / "secrets"
        words = [str(word) for pair in options.items() for word in pair]
        # `python3` in a job's command is the one that runs us.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {name: value for name, value in os.environ.items() if name not in _UNSEEN} | {"PATH": path}
        try:
            with self._log.open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "corral", "serve", "--private", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=env,
                    start_new_session=True,  # Ctrl-C is for us: the jobs are cancelled, then the service ends
                )
        except OSError as error:
            raise InfraError(f"cannot start the local service: {error.strerror}") from error

    def _write_secrets(self) -> None:
        try:
            self.folder.mkdir(mode=0o700)
            if self._secrets:
                (self.folder / "secrets").mkdir(mode=0o700)
            for name, value in self._secrets.items():
                (self.folder / "secrets" / name).write_text(value, encoding="utf-8")
        except OSError as error:
            raise InfraError(f"cannot write {self.folder}: {error.strerror}") from error

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and _ended(child) != 0 and (self.folder / "data").is_dir():
            with suppress(InfraError):
                _ended(self._start())  # adopts what the other left, and cancels it


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Close its standard input and wait; one that does not end is killed, soon when a signal ends our waiting."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    try:
        return child.wait(END)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
    except (KeyboardInterrupt, Terminated):
        with suppress(subprocess.TimeoutExpired):
            child.wait(AFTER_SIGNAL)
        raise
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()


def _said(child: subprocess.Popen[bytes], log: Path) -> str:
    """The URL it prints once it serves. Raises InfraError with its own words when it does not."""
    assert child.stdout is not None
    line = _line(child.stdout, time.monotonic() + START)
    if line.startswith("corral serve: http"):
        return line.removeprefix("corral serve: ").strip()
    told = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
    why = told[-1].removeprefix("error: ")[:500] if told else f"it said nothing for {START:.0f} s"
    raise InfraError(f"the local service does not start: {why}")


def _line(pipe: IO[bytes], until: float) -> str:
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not found.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
            if not (piece := os.read(pipe.fileno(), 4096)):
                break
            found += piece
    return found.decode(errors="replace")
