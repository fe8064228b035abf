"""Runs a function on every rank of a real process group, gloo on this machine, and returns what each rank returned.

The ranks are forked by a server process that has imported torch and transformers once; each launch costs a second or
two.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from corral.engine.rank import Rank

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "corral.engine.engine",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
    ]
)


def on_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """`function(rank, *args)` on `world` ranks; a rank that fails or hangs fails the test with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks = [Rank(r, world, local_rank=r, master=f"127.0.0.1:{port}") for r in range(world)]
        processes = [_CONTEXT.Process(target=_one_rank, args=(folder, rank, function, args)) for rank in ranks]
        for process in processes:
            process.start()
        _join(processes, Path(folder), timeout)
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]


def _one_rank(folder: str, rank: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank.rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank.rank}.error").write_text(traceback.format_exc())
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(processes: list[ForkServerProcess], folder: Path, timeout: float) -> None:
    """Wait for all; as soon as one failed or time is up, end the others and raise."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes):
            failed = [process for process in processes if process.exitcode]
            if failed or time.monotonic() > deadline:
                break
            multiprocessing.connection.wait(
                [process.sentinel for process in processes if process.is_alive()], timeout=1.0
            )
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    errors = [f"{file.stem}: {file.read_text()}" for file in sorted(folder.glob("*.error"))]
    codes = [process.exitcode for process in processes]
    if errors or any(codes):
        raise AssertionError(f"exit codes {codes} within {timeout:.0f} s\n" + "\n".join(errors))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
