"""What a rank and its node host say to each other. Frames are bytes, so a node host never imports torch."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from corral.engine.rank import Rank

RESULT = b"R"  # followed by the pickled result
FAILURE = b"F"  # followed by a pickled Failure
EXIT = b""  # to a rank: leave
KILL = "kill"  # to a zygote: end all ranks and leave


@dataclass(frozen=True)
class RankSpec:
    """One rank of a node, and where its output and progress go."""

    rank: Rank
    run_dir: str
    env: dict[str, str]


@dataclass(frozen=True)
class WorkerSpec:
    """The worker class of every rank, and its pickled arguments (opened in the rank only)."""

    path: str  # module:Class
    args: bytes


@dataclass(frozen=True)
class Launch:
    """To a zygote, once: which ranks to fork (in the order of its rank descriptors) and what they run."""

    ranks: list[RankSpec]
    worker: WorkerSpec


@dataclass(frozen=True)
class Failure:
    """Why a call did not succeed on one rank. `time` is the wall clock of the machine it happened on."""

    node: int
    rank: int
    died: bool  # the process is gone; else it raised
    time: float
    error_type: str  # name of the exception's nearest class in corral.errors, or of the exception; "" when died
    message: str
    traceback: str = ""
    says_where: bool = False  # the message names a place, not necessarily this one


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  # written by our own processes
