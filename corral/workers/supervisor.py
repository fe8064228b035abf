"""The process that owns everything a local cluster starts, and ends it when its parent is gone, in whatever way.

`python -m corral.workers.supervisor CONTROL_FD PARENT_PID SPEC_JSON TIMEOUT` starts the nodes and talks JSON lines on
the control socket. To the parent: {"event": "ready", "address"}, {"event": "exit", "code"} and {"event": "failed",
"reason": "start" | "deadline", "message"}. From it: {"run": argv, "env"}, {"signal": number}; a closed socket means:
end it all.
It adopts orphans (Linux child subreaper), so all processes below it are its descendants and only those are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from corral.workers.logs import last_lines
from corral.workers.node_starter import STARTED, NodesSpec

PR_SET_CHILD_SUBREAPER = 36
TICK = 0.1  # seconds between looks at children, parent and deadline
NODE_GRACE = 0.3  # seconds between SIGTERM and SIGKILL for Ray's processes, which have nothing to save
COMMAND_GRACE = 3.0  # the same while the command runs, which may have
END_BOUND = 15.0  # seconds until end_descendants gives up
STARTER_LOG = "starter.log"


class Supervisor:
    """States: starting nodes → ready → (running a command) → ended."""

    def __init__(self, control: socket.socket, parent: int, spec: NodesSpec, timeout: float) -> None:
        self._control, self._spec = control, spec
        self._temp = Path(spec.temp_dir)
        self._parent = parent  # polled too: a process the parent forked may hold the socket open after it
        self._unread = b""
        self._stopping = False
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._starter: int | None = None
        self._command: int | None = None

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        try:
            if self._spec.nodes:
                self._start_nodes()
            else:
                self._tell(event="ready", address="")
            while not self._stopping and os.getppid() == self._parent:
                self._listen()
                self._reap()
                if self._starter is not None and time.monotonic() > self._deadline:
                    self._fail("deadline", f"the nodes did not start within {self._timeout:g} s")
        finally:
            end_descendants(COMMAND_GRACE if self._command is not None else NODE_GRACE)
            shutil.rmtree(self._temp, ignore_errors=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start_nodes(self) -> None:
        with (self._temp / STARTER_LOG).open("wb") as log:
            command = [sys.executable, "-m", "corral.workers.node_starter", self._spec.to_json()]
            starter = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_env())
        self._starter = starter.pid

    # The parent -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not select.select([self._control], [], [], TICK)[0]:
            return
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._stopping = True
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if "run" in order:
            self._run_command(order["run"], order["env"])
        elif self._command is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._command, order["signal"])

    def _run_command(self, argv: list[str], env: dict[str, str]) -> None:
        """With the supervisor's own stdin, stdout and stderr, which are those of its parent."""
        try:
            self._command = subprocess.Popen(argv, env=env, start_new_session=True).pid
        except OSError as error:
            print(f"corral cluster local: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
            self._tell(event="exit", code=127 if isinstance(error, FileNotFoundError) else 126)

    def _tell(self, **event: object) -> None:
        try:
            self._control.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self._stopping = True

    # Children -------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._starter:
                self._starter = None
                self._started()
            elif pid == self._command:
                self._command = None
                code = os.waitstatus_to_exitcode(status)
                self._tell(event="exit", code=code if code >= 0 else 128 - code)

    def _started(self) -> None:
        result = self._temp / STARTED
        if result.exists():
            self._tell(event="ready", address=json.loads(result.read_text())["address"])
        else:
            self._fail("start", "the Ray nodes did not start")

    def _fail(self, reason: str, what: str) -> None:
        written = [path for path in self._temp.rglob("*") if path.name in _TELLING and path.stat().st_size]
        newest = sorted(written, key=lambda path: path.stat().st_mtime)[-2:]
        said = "; ".join(f"{path.name}: {last_lines(path, 3)}" for path in newest) or "no log yet"
        self._tell(event="failed", reason=reason, message=f"{what}; {said}")
        self._stopping = True


_TELLING = {STARTER_LOG, "gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"}


def _env() -> dict[str, str]:
    """Ray joins a running cluster, or starts in a given folder, when these are set."""
    return {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_TMPDIR")}


def end_descendants(grace: float) -> None:
    """SIGTERM, after `grace` seconds SIGKILL, to every descendant of this process and those that appear meanwhile."""
    me, started, told = psutil.Process(), time.monotonic(), set[int]()
    while (children := me.children(recursive=True)) and time.monotonic() - started < END_BOUND:
        late = time.monotonic() - started > grace
        for child in children:
            if late or child.pid not in told:
                told.add(child.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def main(argv: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(argv[1]))
    Supervisor(control, int(argv[2]), NodesSpec(**json.loads(argv[3])), float(argv[4])).run()


if __name__ == "__main__":
    main(sys.argv)
