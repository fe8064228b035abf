"""A worker that does what tests of the launchers need: answer, fail in many ways, write in many ways."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import corral.errors
from corral.engine.rank import Rank

FIELDS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "ASCEND_RT_VISIBLE_DEVICES",
    "PYTORCH_NPU_ALLOC_CONF",
)


class Toy:
    def __init__(self, rank: Rank, folder: str) -> None:
        self.rank, self.folder = rank, Path(folder)
        self.calls: list[Any] = []

    def close(self) -> None:
        (self.folder / f"closed-{self.rank.rank}").write_text(str(len(self.calls)))

    def echo(self, value: Any) -> tuple[int, Any]:
        self.calls.append(value)
        return self.rank.rank, value

    def history(self) -> list[Any]:
        return self.calls

    def where(self) -> tuple[Rank, int, dict[str, str]]:
        return self.rank, os.getpid(), {name: os.environ[name] for name in FIELDS if name in os.environ}

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def working_folder(self) -> str:
        return os.getcwd()

    def fail(self, kind: str, message: str) -> None:
        raise getattr(corral.errors, kind)(message)

    def fail_if(self, wrong: bool, delay: float = 0.0) -> None:
        time.sleep(delay)  # failures of several ranks in a known order
        if wrong:
            raise ValueError(f"broken on {self.rank.rank}")

    def hang_unless(self, me: int, how: str) -> Any:
        """All ranks but one wait for ever, as in a collective; that one leaves as told."""
        if self.rank.rank != me:
            return self.hang()
        print("about to go", flush=True)
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "unpicklable":
            return threading.Lock()
        if how == "raise":
            raise RuntimeError("one\nline after another")
        return self.hang()

    def hang(self) -> None:
        while True:
            signal.pause()

    def write(self, tag: str) -> None:
        """By every way a process can write, in an order that the log has to keep."""
        print(tag, "print")
        os.write(1, f"{tag} fd 1\n".encode())
        subprocess.run(["sh", "-c", f"echo {tag} shell; echo {tag} shell error >&2"], check=True)
        libc = ctypes.CDLL(None)
        libc.puts(f"{tag} C".encode())
        libc.fflush(None)
        print(tag, "stderr", file=sys.stderr)

    def write_bytes(self, data: bytes) -> None:
        os.write(1, data)
