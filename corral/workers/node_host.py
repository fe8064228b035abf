"""The driver's hand on one node: starts the zygote, passes calls to the node's ranks, notices the dead, reads logs.

Runs as a threaded Ray actor, but knows nothing of Ray; it handles bytes only and imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from corral.findings import Finding
from corral.workers import logs, messages, node_env
from corral.workers.interfaces import interfaces
from corral.workers.messages import Failure, Launch, RankSpec, WorkerSpec

RENDEZVOUS_PORTS = (20000, 32000)  # below the range the kernel hands out to outgoing connections
GRACE = 0.5  # seconds given to other ranks of the node after a failure, so that a death is told from its echoes
EXIT_GRACE = 5.0  # seconds for idle ranks to leave by themselves
NOTICE = 3.0  # seconds between a rank's socket closing and its exit status arriving

Reply = bytes | Failure


class NodeHost:
    """`node`: index in the run. The zygote imports `preload`, in the folder `cwd` if this node has it, with `env` added
    and with what node_env derives for `device` from `address`, which others know the node by, and `wanted`."""

    def __init__(
        self,
        node: int,
        run_dir: str,
        devices: int,
        preload: tuple[str, ...],
        env: dict[str, str],
        cwd: str,
        device: str,
        address: str,
        wanted: dict[str, str],
    ) -> None:
        self._node, self._run_dir = node, Path(run_dir)
        self._ranks: list[int] = []
        self._exits: dict[int, int] = {}  # rank → wait status
        self._pids: dict[int, int] = {}
        self._changed = threading.Condition()  # guards the notices of the zygote
        self._busy = threading.Lock()
        self._zygote_gone = False
        self._stuck = False  # a call ended early: some ranks may never answer
        self._started = threading.Event()
        self._device, self._wanted = device, wanted
        self._control, far = _pair()
        pairs = [_pair() for _ in range(devices)]
        self._connections = [near for near, _ in pairs]
        far_ends = [far, *(far for _, far in pairs)]
        log = logs.node_log(self._run_dir, node)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()  # a run folder that cannot be written shows here, not in the thread
        env = _node_environment(env, node_env.derived(os.environ, interfaces(), address, device, wanted))
        threading.Thread(target=self._keep_zygote, args=(far_ends, preload, env, cwd), daemon=True).start()
        self._started.wait()

    # The zygote -----------------------------------------------------------------------------------------------------

    def _keep_zygote(self, far_ends: list[Connection], preload: tuple[str, ...], env: dict[str, str], cwd: str) -> None:
        """Start the zygote and take its notices until it ends."""
        fds = [end.fileno() for end in far_ends]
        command = [sys.executable, "-m", "corral.workers.zygote", ",".join(map(str, fds)), *preload]
        with logs.node_log(self._run_dir, self._node).open("ab") as output:
            self._zygote = subprocess.Popen(
                command,
                env=env,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=cwd if Path(cwd).is_dir() else None,
            )
        for end in far_ends:
            end.close()
        self._started.set()
        try:
            while True:
                kind, *fields = self._control.recv()
                with self._changed:
                    if kind == "forked":
                        self._pids = fields[0]
                    else:
                        self._exits[fields[0]] = fields[2]
                    self._changed.notify_all()
        except (EOFError, OSError):
            self._zygote.wait()
            with self._changed:
                self._zygote_gone = True
                self._changed.notify_all()

    # Starting -------------------------------------------------------------------------------------------------------

    def unfit(self) -> list[Finding]:
        """What is set on this node that ranks cannot work with."""
        found = node_env.unfit(os.environ, interfaces(), self._device, self._wanted)
        return [replace(each, node=self._node) for each in found]

    def rendezvous(self, host: str) -> str:
        """A "host:port" nobody listens on, for rank 0."""
        for port in random.sample(range(*RENDEZVOUS_PORTS), 200):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
                return f"{host}:{port}"
        raise OSError(f"no free port in {RENDEZVOUS_PORTS} on {host}")

    def visible_devices(self, variable: str) -> str:
        """What Ray lets this node host see."""
        return os.environ.get(variable, "")

    def log_sizes(self, ranks: list[int]) -> dict[int, int]:
        """Bytes already in the logs of an earlier run in the same folder."""
        return {rank: logs.size(logs.rank_log(self._run_dir, self._node, rank)) for rank in ranks}

    def launch(self, ranks: list[RankSpec], worker: WorkerSpec) -> list[Reply]:
        """Fork the ranks and make their workers; the replies are those of a call."""
        self._ranks = [spec.rank.rank for spec in ranks]
        with self._busy:
            try:
                self._control.send(Launch(ranks, worker))
            except OSError:
                return [self._death(self._ranks[0])]
            return self._collect()

    # Calls ----------------------------------------------------------------------------------------------------------

    def call(self, method: str, args: list[bytes]) -> list[Reply]:
        """Pickled results of all ranks in order, or only Failures, without waiting for the other ranks."""
        name = method.encode()
        head = bytes([len(name)]) + name
        with self._busy:
            for connection, blob in zip(self._connections, args, strict=True):
                try:
                    connection.send_bytes(head + blob)
                except OSError:
                    break  # it died between calls; _collect sees the closed socket
            return self._collect()

    def _collect(self) -> list[Reply]:
        results: dict[int, bytes] = {}
        failures: list[Failure] = []
        pending = {connection: rank for rank, connection in zip(self._ranks, self._connections, strict=True)}
        end = float("inf")
        while pending and time.monotonic() < end:
            for connection in wait(list(pending), timeout=min(end - time.monotonic(), 60.0)):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                reply = self._receive(connection, rank)
                if isinstance(reply, Failure):
                    failures.append(reply)
                    end = min(end, time.monotonic() + GRACE)
                else:
                    results[rank] = reply
        self._stuck = self._stuck or bool(pending)
        return list(failures) if failures else [results[rank] for rank in self._ranks]

    def _receive(self, connection: Connection, rank: int) -> Reply:
        try:
            frame = connection.recv_bytes()
        except (EOFError, OSError):
            return self._death(rank)
        if frame[:1] == messages.FAILURE:
            failure: Failure = messages.unpack(frame[1:])
            return failure
        return frame[1:]

    def _death(self, rank: int) -> Failure:
        seen = time.time()
        with self._changed:
            self._changed.wait_for(lambda: rank in self._exits or self._zygote_gone, timeout=NOTICE)
            status = self._exits.get(rank)
            pid = self._pids.get(rank)
        log = logs.rank_log(self._run_dir, self._node, rank)
        if pid is None:  # the zygote ended before it forked
            log, how = logs.node_log(self._run_dir, self._node), "could not start"
        elif status is None:
            how = f"(pid {pid}) died with the process that started it"
        elif os.WIFSIGNALED(status):
            how = f"(pid {pid}) died: signal {os.WTERMSIG(status)} ({signal.Signals(os.WTERMSIG(status)).name})"
        else:
            how = f"(pid {pid}) died: exit code {os.WEXITSTATUS(status)}"
        place = log.relative_to(self._run_dir)
        text = f"worker node-{self._node} rank {rank} {how}; last lines of {place}: {logs.last_lines(log)}"
        return Failure(self._node, rank, died=True, time=seen, error_type="", message=text)

    # Logs and the end -----------------------------------------------------------------------------------------------

    def read_logs(self, offsets: dict[int, int]) -> dict[int, bytes]:
        return logs.read_new(self._run_dir, self._node, offsets)

    def pids(self) -> dict[int, int]:
        """Rank → process id, once forked."""
        with self._changed:
            return dict(self._pids)

    def stop(self) -> None:
        """End the ranks: idle ones may leave by themselves, busy ones are killed. Then the zygote."""
        if not self._stuck and self._busy.acquire(blocking=False):
            try:
                self._dismiss()
            finally:
                self._busy.release()
        with contextlib.suppress(OSError):  # it is gone already
            self._control.send(messages.KILL)
        try:
            self._zygote.wait(timeout=EXIT_GRACE)
        except subprocess.TimeoutExpired:  # still importing, or stuck: its ranks die with it
            self._zygote.kill()
            self._zygote.wait()

    def _dismiss(self) -> None:
        for connection in self._connections[: len(self._ranks)]:
            with contextlib.suppress(OSError):  # it is gone already
                connection.send_bytes(messages.EXIT)
        with self._changed:
            everyone = len(self._ranks)
            self._changed.wait_for(lambda: self._zygote_gone or len(self._exits) >= everyone, timeout=EXIT_GRACE)


def _node_environment(env: dict[str, str], own: dict[str, str | None]) -> dict[str, str]:
    """This process's, with `env`, and with `own`, where None takes a variable away."""
    dropped = {name for name, value in own.items() if value is None}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **env, **{name: value for name, value in own.items() if value is not None}}


def _pair() -> tuple[Connection, Connection]:
    near, far = socket.socketpair()
    return Connection(near.detach()), Connection(far.detach())
