"""The records of an attempt as a tar.gz that is packed while it is sent: nothing is written, little is held in memory.

The job may write there too, and meanwhile. Only regular files that are reached through folders, never through a link,
go in; a file that shrinks under the reader is filled up with zeros, one that grows is cut at the size it had.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from corral.job.backends import folder as files
from corral.job.core.redact import Redactor
from corral.job.protocol.names import relative_path_problem

PREFLIGHT = "preflight.json"
MOST_FILES = 100_000
_ATTEMPT_FILES = (files.DRIVER_LOG, files.END, PREFLIGHT)  # they lie beside `run/` and come to the root of the archive
_DENSE = (".safetensors", ".pt", ".parquet", ".gz", ".zip", ".png")
_PIECE = 1 << 18
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Size:
    files: int
    bytes: int


def size_of(folder: Path) -> Size:
    """Of what `pack` would send now."""
    count = total = 0
    for _, descriptor in _open_files(folder):
        count += 1
        total += os.fstat(descriptor).st_size
    return Size(count, total)


def pack(folder: Path, redactor: Redactor | None) -> Iterator[bytes]:
    """The files of `run/` and those about the attempt, with the secrets of a redactor overwritten in place.

    Of several gzip members, which is one stream to every reader: numbers are not compressed, which takes time and
    saves nothing.
    """
    level, compressor = 1, _compressor(1)
    with closing(_tar(folder, redactor)) as pieces:
        for wanted, piece in pieces:
            if wanted != level:
                yield compressor.flush()
                level, compressor = wanted, _compressor(wanted)
            if data := compressor.compress(piece):
                yield data
    yield compressor.flush()


def _compressor(level: int) -> zlib._Compress:
    return zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # 16: a gzip header


def _tar(folder: Path, redactor: Redactor | None) -> Generator[tuple[int, bytes]]:
    """(level of compression, piece)."""
    with closing(_open_files(folder)) as found:
        for name, descriptor in found:
            level = 0 if name.endswith(_DENSE) else 1
            status = os.fstat(descriptor)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = status.st_size, int(status.st_mtime)
            yield level, entry.tobuf(tarfile.PAX_FORMAT)
            content = _content(descriptor, status.st_size)
            for piece in content if redactor is None else _masked(content, redactor):
                yield level, piece
            yield level, bytes(-status.st_size % _BLOCK)
    yield 1, bytes(2 * _BLOCK)


def _content(descriptor: int, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes."""
    while size:
        piece = os.read(descriptor, min(size, _PIECE)) or bytes(min(size, _PIECE))
        size -= len(piece)
        yield piece


def _masked(pieces: Iterator[bytes], redactor: Redactor) -> Iterator[bytes]:
    """What could be the beginning of a secret waits for the next piece."""
    rest = b""
    for piece in pieces:
        data = redactor.mask(rest + piece)
        kept = min(len(data), max(0, redactor.longest - 1))
        rest = data[len(data) - kept :]
        yield data[: len(data) - kept]
    yield rest


def _open_files(folder: Path) -> Generator[tuple[str, int]]:
    """(name in the archive, descriptor), which is closed when the next one is asked for."""
    with _opened(folder, os.O_DIRECTORY) as at:
        if at is None:
            return
        for name in _ATTEMPT_FILES:
            yield from _regular(name, name, at)
    yield from ((path, found) for path, found in run_files(folder / files.RUN) if path not in _ATTEMPT_FILES)


def run_files(run: Path) -> Generator[tuple[str, int]]:
    """(path below `run`, descriptor) of all regular files, in the order of their names; the descriptor is closed when
    the next one is asked for."""
    with _opened(run, os.O_DIRECTORY) as at:
        if at is None:
            return
        for place, folders, names, inside in os.fwalk(".", dir_fd=at):
            folders.sort()
            for name in sorted(names):
                path = f"{place}/{name}".removeprefix("./")
                if relative_path_problem(path) is None:
                    yield from _regular(path, name, inside)


def _regular(path: str, name: str, at: int) -> Iterator[tuple[str, int]]:
    with _opened(name, os.O_NONBLOCK, at) as descriptor:
        if descriptor is not None and stat.S_ISREG(os.fstat(descriptor).st_mode):
            yield path, descriptor


class _opened:
    """A descriptor, or None for what is not there, is a link, or cannot be read."""

    def __init__(self, path: Path | str, flags: int, at: int | None = None) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=at)

    def __enter__(self) -> int | None:
        return self._descriptor

    def __exit__(self, *exc: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
