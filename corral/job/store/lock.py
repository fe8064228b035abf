"""One service for one data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from corral.errors import InfraError

NAME = "service.lock"


class FolderLock:
    """Held from its making until `release` or the end of the process, however it ends.

    Raises InfraError that names the process that holds it: when that has ended, it works.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InfraError(f"cannot use data folder {folder}: {error.strerror}; choose another one") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            line = f"data folder {folder} is in use by the service with pid {holder}; stop it or choose another folder"
            raise InfraError(line) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None
