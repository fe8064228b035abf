"""Run one command with a time limit, pass its output on as it comes, and leave nothing of it behind.

Every process that the command starts inherits a marker in its environment, so it is found again whatever session, group
or parent it has moved to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from corral.errors import ConfigError

_MARKER = "CORRAL_E2E_CHILD"
_POLL = 0.1  # seconds between looks at the child, the deadline and the signals
_GRACE = 2.0  # seconds in which processes that were told to end may still be on their way out


class Signals:
    """SIGINT and SIGTERM noted instead of raised, so that nothing interrupts cleaning up. Main thread only."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


@dataclass(frozen=True)
class Ended:
    """exit_code is 128 + N when signal N ended the command. cut: why we ended it; None when it ended by itself.
    leftovers: a line for each process that was still there afterwards (it has been killed since)."""

    exit_code: int
    cut: str | None
    late: bool  # cut because of a deadline
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """The command is cut `seconds` after its start unless `until` says that what was waited for has happened."""

    seconds: float
    what: str
    until: Callable[[], bool] = lambda: False


def run_to_the_end(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: Callable[[bytes], object],
    limits: Sequence[Limit],
    stop_seconds: float,
    signals: Signals,
) -> Ended:
    """Run the command until it ends, a limit passes or a signal arrives. The signal is forwarded (SIGTERM at a limit);
    after stop_seconds, or at a second signal, what is left is killed. Raises ConfigError when it cannot be started."""
    marker = uuid.uuid4().hex
    # SPT_NOENV: processes that rename themselves (Ray's do) keep their environment readable.
    child_env = {**env, _MARKER: marker, "SPT_NOENV": "1"}
    try:
        child = subprocess.Popen(
            command,
            env=child_env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from error
    pump = threading.Thread(target=_pump, args=(child, output), daemon=True)
    pump.start()
    try:
        cut, late = _wait(child, limits, signals)
        if cut is not None:
            _stop(child, signals, stop_seconds)
            leftovers: tuple[str, ...] = ()
        else:
            leftovers = _leftovers(marker)
    finally:
        _kill_marked(marker)
        child.wait()
        # The pipe closes with its last writer; all writers are gone, so this ends unless one hid from us.
        pump.join(timeout=5)
    code = child.returncode
    return Ended(code if code >= 0 else 128 - code, cut, late, leftovers)


def _pump(child: subprocess.Popen[bytes], output: Callable[[bytes], object]) -> None:
    assert child.stdout is not None
    while chunk := os.read(child.stdout.fileno(), 65536):
        output(chunk)


def _wait(child: subprocess.Popen[bytes], limits: Sequence[Limit], signals: Signals) -> tuple[str | None, bool]:
    """Why the child has to be ended, and whether that is a deadline; (None, False) when it has ended."""
    started = time.monotonic()
    open_limits = list(limits)
    while True:
        try:
            child.wait(timeout=_POLL)
            return None, False
        except subprocess.TimeoutExpired:
            pass
        if signals.received:
            return signals.received[0].name, False
        open_limits = [limit for limit in open_limits if not limit.until()]
        for limit in open_limits:
            if time.monotonic() - started > limit.seconds:
                return f"{limit.what} after {limit.seconds:g} s", True


def _stop(child: subprocess.Popen[bytes], signals: Signals, seconds: float) -> None:
    """Ask the command to end and wait for it. It may ignore us; the caller kills what is left."""
    already = len(signals.received)
    child.send_signal(signals.received[0] if already else signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline and len(signals.received) <= max(already, 1):
        time.sleep(_POLL)


def _leftovers(marker: str) -> tuple[str, ...]:
    """Processes that outlive the command by more than the grace."""
    deadline = time.monotonic() + _GRACE
    while (found := _marked(marker)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return tuple(_described(process) for process in found)


def _kill_marked(marker: str) -> None:
    """Kill until none is left: a process may fork while its parent is being killed."""
    while found := _marked(marker):
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=1)


def _marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    return found


def _described(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return f"pid {process.pid}"
