"""The life of one rank: redirect its output, make the worker, answer calls until told to leave.

Runs in a process forked by the zygote, before any thread or accelerator exists in it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from corral.engine.rank import Rank
from corral.errors import ConfigError, CorralError
from corral.platform import platform
from corral.workers import messages
from corral.workers.logs import rank_log
from corral.workers.messages import Failure, RankSpec, WorkerSpec
from corral.workers.progress import Progress

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that forked it ends, in whatever way (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def run(spec: RankSpec, worker: WorkerSpec, connection: Connection) -> None:
    """Serve calls on `connection`: the reply to "make the worker" comes first, then one reply per call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(spec.env)
    rank, run_dir = spec.rank, Path(spec.run_dir)
    for name, value in platform(rank.device).environment.items():
        os.environ.setdefault(name, value)
    redirect_output(rank_log(run_dir, rank.node, rank.rank))
    faulthandler.enable()  # a segfault leaves the Python stack in the log
    progress = Progress(run_dir, rank.node, rank.rank)

    def make() -> Any:
        module, _, name = worker.path.partition(":")
        return getattr(importlib.import_module(module), name)(rank, *messages.unpack(worker.args))

    made: list[Any] = []
    _answer(connection, progress, rank, "start", lambda: made.append(make()))
    while True:
        try:
            frame = connection.recv_bytes()
        except EOFError:
            break
        if frame == messages.EXIT:
            break
        _answer(connection, progress, rank, *_bound(made[0], frame))
    if made and hasattr(made[0], "close"):
        made[0].close()


def redirect_output(path: Path) -> None:
    """File descriptors 1 and 2, and with them C code and subprocesses, append to `path`; Python flushes by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _bound(worker: Any, frame: bytes) -> tuple[str, Callable[[], Any]]:
    """The method's name and a function that opens the arguments and runs it (both may raise; that is the rank's)."""
    length = frame[0]
    method = frame[1 : 1 + length].decode()
    return method, lambda: getattr(worker, method)(*messages.unpack(frame[1 + length :]))


def _answer(connection: Connection, progress: Progress, rank: Rank, method: str, action: Callable[[], Any]) -> None:
    progress.start(method)
    try:
        reply, state = messages.RESULT + messages.pack(action()), "idle"
    except Exception as error:  # the boundary of the process: everything is reported to the driver
        if isinstance(error, ConfigError):  # one line, for the user, says all of it
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        reply, state = messages.FAILURE + messages.pack(_failure(rank, error)), "failed"
    sys.stdout.flush()
    sys.stderr.flush()
    progress.end(method, state)
    connection.send_bytes(reply)


def _failure(rank: Rank, error: Exception) -> Failure:
    known = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "corral.errors"]
    name = known[0] if known and known[0] != "CorralError" else type(error).__name__
    text = "".join(traceback.format_exception(error))
    says_where = isinstance(error, CorralError) and error.says_where
    return Failure(rank.node, rank.rank, False, time.time(), name, str(error), text, says_where)
