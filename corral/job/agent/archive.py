"""Archives of others, unpacked with nothing outside of one folder touched."""

from __future__ import annotations

import gzip
import os
import posixpath
import tarfile
import zlib
from pathlib import Path
from typing import IO

from corral.errors import ConfigError
from corral.job.protocol.names import relative_path_problem

MIB = 1 << 20
MEMBERS = 100_000
LONGEST_READ = 4 * MIB  # of the archive at once: headers of tar are read whole


def extract(file: IO[bytes], folder: Path, budget: int, what: str, plain: bool = False) -> None:
    """A tar.gz into an empty folder that nobody else writes to. budget: bytes of all files. what: for messages.
    plain: files and folders only, no links; and not cut.

    Raises ConfigError for an archive that is not what it has to be; OSError when the disk refuses.
    """
    kinds: dict[str, bytes] = {}
    total = 0
    try:
        with (
            _Bounded(file, budget + 2048 * MEMBERS, what) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
        ):
            for member in archive:
                total += member.size
                if total > budget or len(kinds) >= MEMBERS:
                    raise ConfigError(
                        f"{what} unpacks to more than {budget // MIB} MiB or {MEMBERS} files; "
                        "leave out what the job does not need"
                    )
                name = posixpath.normpath(member.name)
                if problem := _problem(member, name, kinds):
                    raise ConfigError(f"{what}: {problem}")
                if plain and not (member.isreg() or member.isdir()):
                    raise ConfigError(f"{what}: {member.name!r} is neither a file nor a folder")
                kinds[name] = member.type
                archive.extract(member, folder, filter="data")
            while plain and stream.read(1 << 20):  # what follows the files: its checksum tells a cut archive
                pass
    except tarfile.FilterError as error:
        raise ConfigError(f"{what}: {error}") from None
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError) as error:
        raise ConfigError(f"{what} is no gzip-compressed tar archive: {error}") from None


def _problem(member: tarfile.TarInfo, name: str, kinds: dict[str, bytes]) -> str | None:
    """Why a member is refused. Stricter than the filter of tarfile, which looks at the folder as it is at the time."""
    if problem := relative_path_problem(member.name):
        return problem
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return f"{member.name!r} is neither a file, a folder nor a link"
    if name in kinds and not (member.isdir() and kinds[name] == tarfile.DIRTYPE):
        return f"{member.name!r} is in it twice"
    parents = [name[:at] for at, char in enumerate(name) if char == "/"]
    if any(kinds.get(parent, tarfile.DIRTYPE) != tarfile.DIRTYPE for parent in parents):
        return f"{member.name!r} lies below a link or a file"
    if member.issym():
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        if member.linkname.startswith("/") or target.split("/")[0] == "..":
            return f"link {member.name!r} leaves it"
    if member.islnk() and kinds.get(posixpath.normpath(member.linkname)) not in tarfile.REGULAR_TYPES:
        return f"hard link {member.name!r} is to no file before it"
    return None


class _Bounded(gzip.GzipFile):
    """A stream that ends a tar bomb: neither too much in all, nor too much at once."""

    def __init__(self, file: IO[bytes], limit: int, what: str) -> None:
        super().__init__(fileobj=file)
        self._limit, self._what = limit, what

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= LONGEST_READ or self.tell() + size > self._limit:
            raise ConfigError(f"{self._what} has headers over {LONGEST_READ // MIB} MiB or too much in all")
        return super().read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset > self._limit:
            raise ConfigError(f"{self._what} holds too much")
        return super().seek(offset, whence)
