"""A world of one in this very process: a call is a method call, so a debugger works and nothing has to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from corral.engine.rank import Rank
from corral.errors import InfraError
from corral.workers.progress import Progress


class InProcess:
    """Launcher of one rank. `factory(rank)` makes the worker object; its exceptions pass through untouched."""

    def __init__(self, factory: Callable[[Rank], Any], device: str = "cpu", run_dir: Path | None = None) -> None:
        self.ranks: Sequence[Rank] = (Rank(device=device),)
        self._progress = Progress(run_dir, node=0, rank=0) if run_dir else None
        self._worker = factory(self.ranks[0])

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(args) != 1:
            raise ValueError(f"{method}: {len(args)} argument tuples for 1 rank")
        if self._progress is None:
            return [getattr(self._worker, method)(*args[0])]
        self._progress.start(method)
        try:
            result = getattr(self._worker, method)(*args[0])
        except BaseException:
            with suppress(InfraError):  # what failed first is the one to report
                self._progress.end(method, "failed")
            raise
        self._progress.end(method, "idle")
        return [result]

    def close(self) -> None:
        """Call the worker's own close(), if it has one, once."""
        worker, self._worker = self._worker, None
        if hasattr(worker, "close"):
            worker.close()
