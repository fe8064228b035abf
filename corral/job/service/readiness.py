"""Whether jobs can be stored and started: each part that the service needs is tried."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Awaitable
from pathlib import Path

from corral.errors import CorralError, InfraError
from corral.job.service.context import Service

SECONDS = 3.0  # for each part to answer
NOBODY = "rj-000000000000"

_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")  # of a URL that people put a password into


async def unready(service: Service) -> str | None:
    """One line that names each part that does not work, and why, without secrets; None when all do."""
    backend = service.runner.backend
    tried = await asyncio.gather(
        _trouble("database", service.journal.read(service.journal.store.get, NOBODY)),
        _trouble("disk", asyncio.to_thread(_write, service.settings.data_dir)),
        _trouble(f"backend {backend.name}", backend.list_owned()),
    )
    said = [trouble for trouble in tried if trouble is not None]
    return f"not ready: {'; '.join(said)}" if said else None


async def _trouble(part: str, works: Awaitable[object]) -> str | None:
    try:
        async with asyncio.timeout(SECONDS):
            await works
    except TimeoutError:
        return f"{part}: no answer within {SECONDS:g} s"
    except CorralError as error:
        return f"{part}: {_USER_INFO.sub('***@', str(error)).removeprefix(f'{part} ')}"
    return None


def _write(folder: Path) -> None:
    """A file without a name, which nothing is left of. Raises InfraError."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise InfraError(f"cannot write to data folder {folder}: {error.strerror}") from error
