"""One node of a cluster, as the mirror sees it: an actor there. It knows nothing of Ray.

What the ranks of a node leave under `run/` is told in pieces, so that a copy elsewhere can follow it. Files that grow
(logs, one JSON object a line) are told from where the last piece ended, others anew and whole when they have changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from corral.errors import CorralError
from corral.job.agent import source
from corral.job.agent.attempt import make_private
from corral.job.agent.records import run_files

MIB = 1 << 20
PIECE = MIB  # bytes of one file at once
LOT = 8 * MIB  # of all files at once
WHOLE = MIB  # larger files that do not grow by the line are told only when the command is over
LARGEST = 64 * MIB  # files over this are left where they are, but for the output of ranks
_GROWING = (".log", ".jsonl")
_OUTPUT = re.compile(r"logs/node-\d+/rank-\d+\.log")
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")  # checkpoints, of which only the small parts are told


@dataclass(frozen=True)
class Known:
    """What a copy has of a file: so many bytes, of a file with this inode and time of its last change."""

    inode: int
    changed: int
    bytes: int


@dataclass(frozen=True)
class Piece:
    """Bytes of a file from `start` on, and what is known with them. path: relative to `run/`. whole: they are all of
    the file, which takes the place of what was there."""

    path: str
    start: int
    content: bytes
    known: Known
    whole: bool


@dataclass
class Grown:
    """more: there is more than fits into one answer. skipped: files that are too large."""

    pieces: list[Piece] = field(default_factory=list)
    more: bool = False
    skipped: list[str] = field(default_factory=list)


class MirrorNode:
    """folder: of the attempt, at the same place as at the head."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def begin(self, mark: str) -> bool:
        """Make the folder; False when it is the very folder of the head, which put the file `mark` there.

        Raises InfraError.
        """
        if (self._folder / mark).exists():
            return False
        make_private(self._folder)
        return True

    def unpack(self, bundle: bytes, digest: str) -> str | None:
        """Unpack the source; one line when that cannot be done."""
        archive = self._folder / ".bundle.tar.gz"
        try:
            archive.write_bytes(bundle)
            source.unpack(archive, digest, self._folder / "source")
        except CorralError as error:
            return str(error)
        except OSError as error:
            return f"cannot write {error.filename}: {error.strerror}"
        finally:
            with suppress(OSError):
                archive.unlink()
        return None

    def grown(self, known: Mapping[str, Known], last: bool) -> Grown:
        """What a copy that has `known` lacks. last: nobody writes any more."""
        answer, room = Grown(), LOT
        with closing(run_files(self._folder / "run")) as found:
            for path, descriptor in found:
                status, before = os.fstat(descriptor), known.get(path)
                largest = WHOLE if path.endswith(_WEIGHTS) else LARGEST
                if status.st_size > largest and not _OUTPUT.fullmatch(path):
                    answer.skipped.append(path)
                    continue
                now = Known(status.st_ino, status.st_mtime_ns, status.st_size)
                if before == now:
                    continue
                if room <= 0:
                    answer.more = True
                    return answer
                piece = _growth(path, descriptor, before, now) or _whole(path, descriptor, now, last)
                if piece is not None:
                    answer.pieces.append(piece)
                    room -= len(piece.content)
                    answer.more = answer.more or piece.known.bytes < now.bytes
        return answer

    def remove(self, all_of_it: bool) -> None:
        """The folder, or the source alone."""
        shutil.rmtree(self._folder if all_of_it else self._folder / "source", ignore_errors=True)


def _growth(path: str, descriptor: int, before: Known | None, now: Known) -> Piece | None:
    if not path.endswith(_GROWING):
        return None
    start = before.bytes if before is not None and before.inode == now.inode and before.bytes <= now.bytes else 0
    content = os.pread(descriptor, min(PIECE, now.bytes - start), start)
    end = start + len(content)
    # The time is that of the whole only when all of it is told.
    return Piece(path, start, content, Known(now.inode, now.changed if end == now.bytes else 0, end), whole=False)


def _whole(path: str, descriptor: int, now: Known, last: bool) -> Piece | None:
    if path.endswith(_GROWING) or (now.bytes > WHOLE and not last):
        return None
    content = b""
    while piece := os.pread(descriptor, now.bytes - len(content), len(content)):
        content += piece
    return Piece(path, 0, content, Known(now.inode, now.changed, now.bytes), whole=True)
