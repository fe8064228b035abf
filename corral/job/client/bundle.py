"""The source of a job as one archive whose name is the digest of its content: equal files give an equal archive."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from corral.errors import ConfigError, InfraError
from corral.job.client.files import Listing

MIB = 1 << 20


@dataclass(frozen=True)
class Budget:
    """Bytes of all files together, and of the archive; the service has the same limits."""

    unpacked: int = 512 * MIB
    packed: int = 64 * MIB


@dataclass(frozen=True)
class Bundle:
    """digest: hex SHA-256 of the archive `path`, which has `size` bytes and these members."""

    digest: str
    path: Path
    size: int
    members: frozenset[str]


@contextmanager
def packed(listing: Listing, budget: Budget | None = None) -> Iterator[Bundle]:
    """Pack the files into a temporary gzip-compressed tar archive that is gone afterwards.

    Nothing but paths, contents and the executable bit goes in: times, owners and other mode bits are fixed. A file that
    is deleted meanwhile is left out. Raises ConfigError, which names the biggest files, above the budget.
    """
    budget = budget or Budget()
    _check_size(listing, budget)
    with tempfile.TemporaryDirectory(prefix="corral-bundle-") as folder:
        path = Path(folder) / "source.tar.gz"
        try:
            with path.open("wb") as raw:
                hashing = _Hashing(raw)
                with gzip.GzipFile(filename="", mode="wb", compresslevel=6, mtime=0, fileobj=hashing) as stream:
                    members = _write(listing, stream)
        except OSError as error:
            raise InfraError(f"cannot pack the source into {folder}: {error.strerror}; TMPDIR names another") from None
        if hashing.size > budget.packed:
            raise _too_big(listing, hashing.size, budget.packed, "packed")
        yield Bundle(hashing.digest(), path, hashing.size, frozenset(members))


class _Hashing:
    """A file that is only written to, and hashed on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()


def _write(listing: Listing, stream: gzip.GzipFile) -> list[str]:
    members = []
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path, full in listing.files().items():
            entry = tarfile.TarInfo(path)  # times, uid and gid are 0
            try:
                if full.is_symlink():
                    entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, os.readlink(full)
                    archive.addfile(entry)
                else:
                    content = full.read_bytes()
                    entry.size = len(content)
                    entry.mode = 0o755 if full.stat().st_mode & 0o100 else 0o644
                    archive.addfile(entry, BytesIO(content))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except PermissionError as error:
                raise ConfigError(f"cannot read {full}: {error.strerror}; ignore it in .gitignore") from None
            members.append(path)
    return members


def _check_size(listing: Listing, budget: Budget) -> None:
    total = sum(size for _, size in _sizes(listing))
    if total > budget.unpacked:
        raise _too_big(listing, total, budget.unpacked, "unpacked")


def _sizes(listing: Listing) -> Iterator[tuple[str, int]]:
    for path, full in listing.files().items():
        if full.exists():
            yield path, full.lstat().st_size


def _too_big(listing: Listing, size: int, limit: int, how: str) -> ConfigError:
    biggest = sorted(_sizes(listing), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{path} ({bytes_ / MIB:.1f} MiB)" for path, bytes_ in biggest)
    return ConfigError(
        f"the source in {listing.root} has {size / MIB:.1f} MiB {how}, the limit is {limit / MIB:.0f} MiB; "
        f"ignore what the job does not need in .gitignore; the biggest: {named}"
    )
