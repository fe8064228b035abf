"""The command of a job: started in a session of its own, stopped with everything in it, its output kept in one file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from corral.errors import ConfigError, InfraError

SWEEP_GRACE = 1.0  # seconds between SIGTERM and SIGKILL for what the command left behind
SWEEP_BOUND = 3.0  # seconds until no more is waited for


class Command:
    """Runs from its making on. `stop` may be called from any thread and from a signal handler, the rest from one.

    stdout and stderr are one pipe into `cat`, which appends to `output` and outlives the agent: a command never waits
    for the agent, and `echo … > /dev/stderr`, which empties a file that is opened so, does no harm.

    Raises ConfigError when the command or its folder is not there or cannot be run; `exit_code` of the error is then
    127 or 126, as a shell has it. Raises InfraError when the output cannot be kept.
    """

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path) -> None:
        self._kill_at = float("inf")
        self._ended = False
        self._keeper, pipe = _start_keeper(output)
        try:
            self._process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            os.close(pipe)
            self._keeper.communicate()
            raise _not_started(argv[0], cwd, error) from None
        os.close(pipe)
        self.pid = self._process.pid

    def stop(self, grace: float) -> None:
        """SIGTERM to the process group now, SIGKILL after `grace` seconds; a second call can only bring that forward.

        The kill happens in `wait`.
        """
        first = self._kill_at == float("inf")
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        if first:
            self._signal(signal.SIGTERM)

    @property
    def stopping(self) -> bool:
        return self._kill_at < float("inf")

    def wait(self, timeout: float) -> int | None:
        """The exit code, 128 + n when signal n ended it; None when it still runs after `timeout` seconds."""
        if time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._ended = True
        return code if code >= 0 else 128 - code

    def sweep(self) -> str | None:
        """End what is left of the session and wait for the last output; what went wrong with keeping it, if anything.

        Takes SWEEP_BOUND seconds at most. When the command was stopped, there was a grace already.
        """
        started = time.monotonic()
        grace = 0.0 if self.stopping else SWEEP_GRACE
        told: set[int] = set()
        while (left := _session(self.pid)) and time.monotonic() - started < SWEEP_BOUND:
            late = time.monotonic() - started >= grace
            for process in left:
                if late or process.pid not in told:
                    told.add(process.pid)
                    with suppress(psutil.Error):
                        process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.02)
        try:
            said = self._keeper.communicate(timeout=max(0.5, SWEEP_BOUND - (time.monotonic() - started)))[1]
        except subprocess.TimeoutExpired:
            return None  # somebody outside the session holds the pipe; it goes on being written
        if self._keeper.returncode == 0:
            return None
        reason = said.decode("utf-8", "replace").strip().rpartition(": ")[2]
        return f"its output could not be kept: {reason or f'cat ended with {self._keeper.returncode}'}"

    def _signal(self, number: int) -> None:
        if not self._ended:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def _start_keeper(output: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that appends to `output` what is written to the pipe, until the last writer closes it."""
    cat = shutil.which("cat")
    if cat is None:
        raise InfraError("cannot keep the output of the command: `cat` is not on PATH of the node")
    read, write = os.pipe()
    try:
        with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file, polite_blocked():
            keeper = subprocess.Popen(
                [cat], stdin=read, stdout=file, stderr=subprocess.PIPE, start_new_session=True, cwd="/"
            )
    except OSError as error:
        os.close(write)
        raise InfraError(f"cannot keep the output of the command: {error.strerror}") from None
    finally:
        os.close(read)
    return keeper, write


@contextmanager
def polite_blocked() -> Iterator[None]:
    """For what is started inside: whoever asks all processes of a job to end must not cut off its last words."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _not_started(name: str, cwd: Path, error: OSError) -> ConfigError | InfraError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        missing = ConfigError(f"command {name} is not there" if cwd.is_dir() else f"folder {cwd} is not there")
        missing.exit_code = 127
        return missing
    if isinstance(error, PermissionError) or error.errno == 8:  # ENOEXEC
        refused = ConfigError(f"command {name} cannot be executed: {error.strerror}")
        refused.exit_code = 126
        return refused
    return InfraError(f"cannot start {name}: {error.strerror}")


def _session(leader: int) -> list[psutil.Process]:
    """Processes of the session that still run."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, ProcessLookupError):
            if pid != os.getpid() and os.getsid(pid) == leader:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found
