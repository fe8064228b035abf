"""The records of a job: fetched whole or not at all, unpacked so that nothing outside the folder can be touched."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import tarfile
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

import httpx

from corral import atomic
from corral.errors import ConfigError, InfraError
from corral.job.client.api import Api, BusyError, reason
from corral.job.client.text import one_line
from corral.job.protocol.names import relative_path_problem

MIB = 1 << 20
_LONGEST_READ = 4 * MIB  # of the archive at once: headers of tar are read whole
_HEADERS = 2048  # bytes that tar adds to a file


@dataclass(frozen=True)
class Budget:
    """Bytes of all files together, and how many."""

    unpacked: int = 8 << 30
    files: int = 200_000


async def fetch(api: Api, job_id: str, to: Path, attempt: int | None = None, budget: Budget | None = None) -> None:
    """Put the records of an attempt (None: the last) into `to`, a new folder, or in place of an older one.

    Raises AbsentError when the service has none, ConfigError for an archive that is not what it has to be, InfraError
    when it cannot be had or written.
    """
    budget = budget or Budget()
    try:
        with tempfile.TemporaryFile(prefix="corral-records-") as file:
            await _download(api, job_id, attempt, file, budget)
            file.seek(0)
            with atomic.new_folder(to) as fresh:
                await asyncio.to_thread(unpack, file, fresh, budget)
    except OSError as error:
        raise InfraError(f"cannot keep the records of {job_id} in {to}: {error.strerror}") from error


async def _download(api: Api, job_id: str, attempt: int | None, file: IO[bytes], budget: Budget) -> None:
    """Into `file`, from its start, again after every cut for as long as the patience of `api` says."""
    params = {} if attempt is None else {"attempt": str(attempt)}
    path = f"/api/v1/rayjobs/{quote(job_id, safe='')}/records"
    begun = time.monotonic()
    for pause in api.patience.pauses():
        file.seek(0)
        file.truncate()
        try:
            async with api.stream(path, params) as answer:
                async for piece in answer.aiter_raw():
                    if file.tell() + len(piece) > budget.unpacked:
                        raise ConfigError(f"the records of {job_id} are over {budget.unpacked // MIB} MiB")
                    file.write(piece)
            return
        except httpx.RequestError as error:
            problem = reason(error)
        except BusyError as error:
            problem, pause = str(error), max(pause, min(error.after, 30.0))
        if time.monotonic() - begun + pause > api.patience.reconnect:
            raise InfraError(f"the records of {job_id} cannot be had: {problem}; corral records {job_id} tries again")
        await asyncio.sleep(pause)


def unpack(file: IO[bytes], folder: Path, budget: Budget) -> None:
    """A tar.gz into an empty folder that nobody else writes to. Raises ConfigError; OSError when the disk refuses."""
    count = total = 0
    try:
        with (
            _Bounded(file, budget.unpacked + _HEADERS * budget.files) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
        ):
            for member in archive:
                count, total = count + 1, total + member.size
                if total > budget.unpacked or count > budget.files:
                    raise ConfigError(f"the records are over {budget.unpacked // MIB} MiB or {budget.files} files")
                if not member.isreg() or relative_path_problem(member.name):
                    raise ConfigError(f"the records hold {one_line(member.name)[:80]!r}, which is no plain file")
                _write(archive, member, folder / member.name)
            stream.seek(archive.offset)  # tarfile takes a header that is cut or broken for the end
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ConfigError("the records end before the end of their archive")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError) as error:
        raise ConfigError(f"the records are no gzip-compressed tar archive: {one_line(str(error))}") from None
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"the records name a file twice: {Path(str(error.filename)).relative_to(folder)}") from None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None  # it is a regular file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as target:
        shutil.copyfileobj(content, target)


class _Bounded(gzip.GzipFile):
    """A stream that ends a tar bomb: neither too much in all, nor too much at once."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        super().__init__(fileobj=file)
        self._limit = limit

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_READ or self.tell() + size > self._limit:
            raise ConfigError(f"the records have headers over {_LONGEST_READ // MIB} MiB or too much in all")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > self._limit:
            raise ConfigError("the records hold too much")
        return super().seek(offset, whence)
