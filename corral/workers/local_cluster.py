"""Ray nodes on this machine, owned by a supervisor process that outlives nothing.

with LocalCluster.start(nodes=2, devices_per_node=4, resource="CPU") as cluster:
    ray.init(address=cluster.address)
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from corral.errors import DeadlineError, InfraError
from corral.workers.node_starter import NodesSpec

LONGEST_TEMP = 40  # bytes: Ray's socket paths below the folder must fit into 107
END_BOUND = 20.0  # seconds the supervisor may take to end everything


class LocalCluster:
    """A running cluster; `seconds` is what its start took. Made by `start`, ended by `close` or `with`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, temp_dir: Path) -> None:
        self.address = ""
        self.seconds = 0.0
        self.temp_dir = temp_dir
        self.supervisor_pid = process.pid
        self._process, self._control, self._unread = process, control, b""

    @classmethod
    def start(
        cls,
        nodes: int,
        devices_per_node: int,
        resource: str = "CPU",
        port: int = 0,
        timeout: float = 120.0,
        temp_dir: Path | None = None,
        head: Literal["shared", "separate"] = "shared",
    ) -> LocalCluster:
        """Nodes named node-0, node-1, ...; the first is the head, unless that is `separate`: then a further node
        without devices is. `port` 0: the kernel chooses the head's. `nodes` 0: no Ray, only a supervisor for commands;
        the address is "". `temp_dir`: made here, removed at the end.

        Raises InfraError when the port is taken or Ray does not start, DeadlineError after `timeout` seconds; both
        quote the last lines of Ray's logs.
        """
        began = time.monotonic()
        if port:
            _check_port(port)
        temp_dir = _temp_dir(temp_dir)
        spec = NodesSpec(nodes, devices_per_node, resource, str(temp_dir), port, head)
        near, far = socket.socketpair()
        command = [sys.executable, "-m", "corral.workers.supervisor", str(far.fileno()), str(os.getpid())]
        command += [spec.to_json(), str(timeout)]
        try:
            process = subprocess.Popen(command, pass_fds=[far.fileno()], start_new_session=True)
        except BaseException:
            shutil.rmtree(temp_dir, ignore_errors=True)
            raise
        far.close()
        cluster = cls(process, near, temp_dir)
        try:
            event = cluster._next_event(timeout + END_BOUND)
            if event["event"] == "failed":
                kind = DeadlineError if event["reason"] == "deadline" else InfraError
                raise kind(f"local Ray nodes ({nodes} x {devices_per_node} {resource}): {event['message']}")
        except BaseException:
            cluster.close()
            raise
        cluster.address = event["address"]
        cluster.seconds = time.monotonic() - began
        return cluster

    def run(self, argv: Sequence[str], env: dict[str, str]) -> None:
        """Start a command below the supervisor, with this process's stdin, stdout and stderr."""
        self._send({"run": list(argv), "env": env})

    def signal(self, number: int) -> None:
        """Pass a signal to the command's process group."""
        self._send({"signal": number})

    def wait_for_command(self) -> int:
        """Its exit code, 128 + n when signal n ended it."""
        return int(self._next_event(None)["code"])

    def close(self) -> None:
        """End all processes of the cluster and remove its folder; returns when they are gone."""
        self._control.close()
        try:
            self._process.wait(END_BOUND)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise InfraError(
                f"supervisor {self.supervisor_pid} of local Ray nodes did not end in {END_BOUND:g} s"
            ) from None
        finally:
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, order: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(order).encode() + b"\n")

    def _next_event(self, timeout: float | None) -> dict[str, Any]:
        while b"\n" not in self._unread:
            if not select.select([self._control], [], [], timeout)[0]:
                raise DeadlineError(f"local Ray nodes: no word from the supervisor in {timeout:g} s")
            data = self._control.recv(1 << 16)
            if not data:
                raise InfraError(f"local Ray nodes: their supervisor (pid {self.supervisor_pid}) died")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        return event


def _temp_dir(named: Path | None) -> Path:
    if named is not None:
        if len(os.fsencode(named)) > LONGEST_TEMP:
            raise InfraError(f"local Ray nodes: {named} is over {LONGEST_TEMP} bytes long; name a shorter folder")
        try:
            named.mkdir(mode=0o700)
        except OSError as error:
            raise InfraError(f"local Ray nodes: cannot make {named}: {error.strerror}; name a new folder") from error
        return named
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len("/corral-12345678") <= LONGEST_TEMP:
            return Path(tempfile.mkdtemp(prefix="corral-", dir=parent))
    raise InfraError(f"local Ray nodes: no temporary folder with a path below {LONGEST_TEMP} bytes; set TMPDIR=/tmp")


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InfraError(
                f"local Ray nodes: port taken: {port} ({error.strerror}); choose another with --port, or leave it out"
            ) from None
