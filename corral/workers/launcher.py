"""The launcher's contract: one worker object per rank, and calls on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from corral.errors import ConfigError, CorralError

if TYPE_CHECKING:  # engine.rank is light, but a launcher is typed before anything of the engine is needed
    from corral.engine.rank import Rank

LineSink = Callable[[int, int, str], None]  # (node, rank, one complete line without its line end)


class WorkerError(CorralError):
    """The code of a worker raised something Corral did not foresee. `details` is the traceback of the rank."""

    exit_code = 1

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Launcher(Protocol):
    """Runs one worker object per rank. Not for concurrent use by several threads."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks in order: by node, then by device."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `method(*args[i])` on rank i, all ranks at the same time; result i belongs to rank i.

        Raises InfraError for a rank or node that died, the CorralError a rank raised (rank added to its text), and
        for any other exception WorkerError from a remote rank, or the exception itself in process. Other ranks are
        not waited for, as they may hang in a collective: after an error from a remote rank only close() is left.
        """

    def close(self) -> None:
        """End all ranks within a bound and deliver what they still had to say. May be called twice."""


def sink_for(environ: Mapping[str, str]) -> LineSink | None:
    """Where lines of ranks go besides their files: the driver's stdout; nowhere when CORRAL_RANK_OUTPUT is `files`.

    Raises ConfigError for any other value.
    """
    where = environ.get("CORRAL_RANK_OUTPUT", "driver")
    if where not in ("driver", "files"):
        raise ConfigError(
            f"CORRAL_RANK_OUTPUT={where[:80]!r} is unknown; use driver (show the output of ranks) or files (only)"
        )
    return print_line if where == "driver" else None


def print_line(node: int, rank: int, line: str) -> None:
    """The default sink: one line of a rank on the driver's stdout."""
    print(f"[node-{node} rank-{rank}] {line}", flush=True)
