"""Sources of jobs: archives named by their digest, `<data_dir>/bundles/<2 hex>/<digest>.tar.gz`."""

from __future__ import annotations

import gzip
import hashlib
import os
import posixpath
import tarfile
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from corral.errors import ConfigError, InfraError
from corral.job.protocol.names import DIGEST

MIB = 1 << 20
MEMBERS = 100_000
LONGEST_READ = 4 * MIB  # of an archive at once: headers of tar are read whole
LISTED = 64  # listings kept in memory


class Upload:
    """A bundle on its way in. `write` may be called with pieces of any size."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._limit = limit
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, piece: bytes) -> None:
        """Raises ConfigError as soon as there is too much."""
        self.size += len(piece)
        if self.size > self._limit:
            raise ConfigError(f"the bundle is over the limit of {self._limit} bytes; leave out what the job needs not")
        self._hash.update(piece)
        self._file.write(piece)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Bundles:
    """Thread-safe; a bundle is whole or absent. packed, unpacked: most bytes of one archive and of its files."""

    def __init__(self, data_dir: Path, packed: int = 64 * MIB, unpacked: int = 512 * MIB) -> None:
        self._folder = data_dir / "bundles"
        self._packed = packed
        self._unpacked = unpacked
        self._listed: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._lock = threading.Lock()
        for left in self._folder.glob("??/.upload-*"):  # by a service that was killed
            left.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ConfigError("the name of a bundle is 64 hex digits, its SHA-256")
        return self._folder / digest[:2] / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    @contextmanager
    def receive(self, digest: str) -> Iterator[Upload]:
        """Write the archive inside; it is there after the block, if its digest fits and nothing was raised.

        Raises ConfigError for another digest and for too many bytes, InfraError for what the disk refuses.
        """
        path = self.path(digest)
        temporary: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(prefix=".upload-", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                upload = Upload(file, self._packed)
                yield upload
                if upload.digest != digest:
                    raise ConfigError(
                        f"the bundle has digest {upload.digest}, not {digest} ({upload.size} bytes); upload it again"
                    )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            temporary = None
        except OSError as error:
            raise InfraError(f"cannot store bundle {digest[:12]}…: {error.strerror}; free space") from error
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def members(self, digest: str) -> frozenset[str]:
        """Names of its files and links, normalised. Nothing is unpacked.

        Raises ConfigError for what is no archive, is too big or names something outside of it.
        """
        with self._lock:
            if (known := self._listed.get(digest)) is not None:
                self._listed.move_to_end(digest)
                return known
        try:
            with self.path(digest).open("rb") as file:
                names = _names(file, self._unpacked)
        except FileNotFoundError:
            raise ConfigError(f"bundle {digest} is not here; upload it first") from None
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError, ValueError) as error:
            raise ConfigError(f"the bundle is no gzip-compressed tar archive: {error}") from None
        with self._lock:
            self._listed[digest] = names
            while len(self._listed) > LISTED:
                self._listed.popitem(last=False)
        return names


def _names(file: IO[bytes], budget: int) -> frozenset[str]:
    found: set[str] = set()
    total = count = 0
    with (
        gzip.GzipFile(fileobj=file) as stream,
        tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream, budget + 2048 * MEMBERS)), mode="r:") as archive,
    ):
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all it has seen
            total, count = total + member.size, count + 1
            if total > budget or count > MEMBERS:
                raise ConfigError(f"the bundle unpacks to more than {budget // MIB} MiB or {MEMBERS} files")
            name = posixpath.normpath(member.name)
            if name.startswith("/") or name.split("/")[0] == "..":
                raise ConfigError(f"the bundle names {member.name[:80]!r}, which lies outside of it")
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                raise ConfigError(f"the bundle holds {member.name[:80]!r}, which is no file, folder or link")
            if not member.isdir():
                found.add(name)
    return frozenset(found)


class _Bounded:
    """A stream that ends a tar bomb: neither too much in all, nor too much at once."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit = stream, limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LONGEST_READ or self._stream.tell() + size > self._limit:
            raise ConfigError(f"the bundle has headers over {LONGEST_READ // MIB} MiB, or too much in all")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset > self._limit:
            raise ConfigError("the bundle holds too much")
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()
