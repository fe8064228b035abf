"""One process per node that imports the heavy modules once and then forks the node's ranks.

`python -m corral.workers.zygote CONTROL_FD RANK_FD...` reads one pickled Launch from the control connection, after the
imports. It reports ("exited", rank, pid, wait status) for every rank that ends, and ends all of them, itself last,
when told "kill" or when the other end of the control connection is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from corral.workers import rank_process
from corral.workers.messages import Launch, RankSpec, WorkerSpec


def main(argv: list[str]) -> None:
    control_fd, *rank_fds = (int(value) for value in argv[1].split(","))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Connection(control_fd)
    for module in argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forked ranks share these pages; a collection must not touch them
    try:
        launch = control.recv()
    except EOFError:
        return
    if not isinstance(launch, Launch):  # "kill" before there was anything to launch
        return
    pids = {
        _fork(spec, launch.worker, index, rank_fds, control): spec.rank.rank for index, spec in enumerate(launch.ranks)
    }
    for fd in rank_fds:
        os.close(fd)
    control.send(("forked", {rank: pid for pid, rank in pids.items()}))
    _watch(control, pids)


def _fork(spec: RankSpec, worker: WorkerSpec, index: int, rank_fds: list[int], control: Connection) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rank_process.die_with_parent(zygote)
        control.close()
        for other, fd in enumerate(rank_fds):
            if other != index:
                os.close(fd)
        rank_process.run(spec, worker, Connection(rank_fds[index]))
        code = 0
    except BaseException:  # a forked child must never return into the zygote's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(control: Connection, pids: dict[int, int]) -> None:
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(control.fileno(), selectors.EVENT_READ, "control")
        selector.register(reader, selectors.EVENT_READ, "child")
        while True:
            _reap(control, pids, os.WNOHANG)
            ready = {key.data for key, _ in selector.select()}
            if "control" in ready:  # "kill", or the node host is gone
                break
            reader.recv(4096)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _reap(control, pids, 0)


def _reap(control: Connection, pids: dict[int, int], options: int) -> None:
    while pids:
        pid, status = os.waitpid(-1, options)
        if pid == 0:
            return
        rank = pids.pop(pid, None)
        if rank is not None:
            with contextlib.suppress(OSError):  # the node host is gone; ending the ranks matters more
                control.send(("exited", rank, pid, status))


if __name__ == "__main__":
    main(sys.argv)
