"""The records that an agent sends of an attempt: unpacked beside what the service has of it, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from corral.errors import ConfigError
from corral.job.agent.archive import MIB, extract
from corral.job.agent.records import PREFLIGHT
from corral.job.backends import folder as files

WHAT = "the archive of records"
_ONCE = (files.END, PREFLIGHT)  # what the service has of these stays


class Upload:
    """An archive on its way in, in a file without a name. `write` may be called with pieces of any size."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file, self._limit = file, limit
        self._size = 0

    def write(self, piece: bytes) -> None:
        """Raises ConfigError as soon as there is too much."""
        self._size += len(piece)
        if self._size > self._limit:
            raise ConfigError(f"{WHAT} is over the limit of {self._limit // MIB} MiB")
        self._file.write(piece)

    def unpack(self, folder: Path) -> None:
        """Into the folder of the attempt: see `keep`. Raises ConfigError and OSError."""
        self._file.seek(0)
        keep(self._file, folder, self._limit)


@contextmanager
def upload(folder: Path, limit: int) -> Iterator[Upload]:
    """limit: bytes, packed and unpacked. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        yield Upload(file, limit)


def keep(archive: IO[bytes], folder: Path, limit: int) -> None:
    """Unpack all of an archive as `records.pack` makes it, then put file after file into its place, so that nobody who
    reads the folder meanwhile sees half a file. What was sent before is replaced; end.json and preflight.json, and a
    longer driver.log, are not.

    Raises ConfigError for an archive that is not what it has to be, before anything is touched; OSError when the disk
    refuses, after which the archive can be sent again.
    """
    fresh = Path(tempfile.mkdtemp(prefix=".records-", dir=folder))
    try:
        extract(archive, fresh, limit, WHAT, plain=True)
        _place_own(fresh, folder)
        for place, _, names in os.walk(fresh):
            target = folder / files.RUN / Path(place).relative_to(fresh)
            if not target.is_dir():
                files.remove(target)
                target.mkdir(mode=0o700)
            for name in names:
                if (target / name).is_dir():
                    files.remove(target / name)
                os.replace(Path(place) / name, target / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _place_own(fresh: Path, folder: Path) -> None:
    """The files about the attempt, which lie beside the others at the root of the archive."""
    for name in _ONCE:
        if (fresh / name).is_file():
            if not (folder / name).exists():
                os.replace(fresh / name, folder / name)
            else:
                (fresh / name).unlink()
    log = fresh / files.DRIVER_LOG
    if log.is_file():
        there = folder / files.DRIVER_LOG
        if there.exists() and there.stat().st_size > log.stat().st_size:
            log.unlink()
        else:
            os.replace(log, there)
