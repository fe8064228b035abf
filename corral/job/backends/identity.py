"""Which service it is: what tells its jobs on a cluster from those of others, which may know nothing of each other."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from corral.atomic import undone_on_failure
from corral.errors import ConfigError, InfraError

NAME = "service.id"

_ID = re.compile(r"[0-9a-f]{12}\n")  # short, and of letters that a label may have


def service_id(data_dir: Path) -> str:
    """Twelve hexadecimal digits from `<data_dir>/service.id`, drawn at random when the folder is used for the first
    time. They go where the folder goes, and outlive its database; a folder's path says nothing, as two pods may well
    have the same.

    Raises ConfigError for a file that holds something else, InfraError when the folder cannot be used.
    """
    path = data_dir / NAME
    if not path.exists():
        _draw(path)
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise InfraError(f"cannot read {path}: {error.strerror}") from error
    if not _ID.fullmatch(text):
        raise ConfigError(
            f"{path} does not hold a service's id; restore it from a backup, or delete it: the service then has a new "
            "one, and leaves alone what it had on its cluster"
        )
    return text.strip()


def _draw(path: Path) -> None:
    """Of several processes that do so at once, all keep what the first one drew."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with undone_on_failure(path, lambda: temporary.unlink(missing_ok=True)):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(6)}\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
