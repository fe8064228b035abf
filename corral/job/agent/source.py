"""The source of a job: a bundle checked against its digest and unpacked, with nothing outside its folder touched."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import IO

from corral.errors import ConfigError, InfraError
from corral.job.agent.attempt import Attempt
from corral.job.protocol.names import relative_path_problem

MIB = 1 << 20
UNPACKED = 512 * MIB
MEMBERS = 100_000
LONGEST_READ = 4 * MIB  # of the archive at once: headers of tar are read whole


def prepare(attempt: Attempt) -> None:
    """Unpack the bundle, if there is one, into a fresh `source/` and look for the script.

    Raises ConfigError for a bundle or script that is not what it has to be, InfraError for a damaged copy or a full
    disk.
    """
    spec = attempt.spec
    if spec.bundle is not None:
        _unpack(Path(spec.bundle_path or ""), spec.bundle, attempt.source)
    if spec.script is None:
        return
    script = (attempt.source if spec.bundle is not None else attempt.folder / spec.cwd) / spec.script
    if not script.is_file():
        where = "in the source" if spec.bundle is not None else "on the node that runs the job"
        raise ConfigError(f"script {spec.script} is not {where}")


def _unpack(bundle: Path, digest: str, target: Path, budget: int = UNPACKED) -> None:
    fresh = target.with_name(".source.unpacking")
    try:
        for folder in (fresh, target):
            if folder.exists():
                shutil.rmtree(folder)
        fresh.mkdir(mode=0o700)
        with bundle.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise InfraError(f"the copy of the source bundle has digest {found[:12]}…, not {digest[:12]}…")
            file.seek(0)
            _extract(file, fresh, budget)
        fresh.replace(target)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise ConfigError(f"the source bundle: {error.strerror}: {str(error.filename)[-80:]!r}") from None
        raise InfraError(f"cannot unpack the source bundle: {error.strerror}") from None


def _extract(file: IO[bytes], folder: Path, budget: int) -> None:
    kinds: dict[str, bytes] = {}
    total = 0
    try:
        with (
            _Bounded(file, budget + 2048 * MEMBERS) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
        ):
            for member in archive:
                total += member.size
                if total > budget or len(kinds) >= MEMBERS:
                    raise ConfigError(
                        f"the source bundle unpacks to more than {budget // MIB} MiB or {MEMBERS} files; "
                        "leave out what the job does not need"
                    )
                name = posixpath.normpath(member.name)
                if problem := _problem(member, name, kinds):
                    raise ConfigError(f"the source bundle: {problem}")
                kinds[name] = member.type
                archive.extract(member, folder, filter="data")
    except tarfile.FilterError as error:
        raise ConfigError(f"the source bundle: {error}") from None
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError) as error:
        raise ConfigError(f"the source bundle is no gzip-compressed tar archive: {error}") from None


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

    def __init__(self, file: IO[bytes], limit: int) -> None:
        super().__init__(fileobj=file)
        self._limit = limit

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= LONGEST_READ or self.tell() + size > self._limit:
            raise ConfigError(f"the source bundle has headers over {LONGEST_READ // MIB} MiB or too much in all")
        return super().read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset > self._limit:
            raise ConfigError("the source bundle holds too much")
        return super().seek(offset, whence)
