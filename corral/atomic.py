"""Files that are whole or absent: written beside their place, then renamed. What the disk refuses becomes one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from corral.errors import InfraError


def write_text(path: Path, text: str) -> None:
    """Write `path`, and its folder where it is missing: a reader sees the old file or the new one, never half of it.

    Raises InfraError when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with undone_on_failure(path, lambda: temporary.unlink(missing_ok=True)):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


@contextmanager
def undone_on_failure(path: Path, undo: Callable[[], object]) -> Iterator[None]:
    """Half-written is undone, also at Ctrl-C. Raises InfraError that names `path` for what the file system refuses."""
    try:
        yield
    except BaseException as error:
        with suppress(NotADirectoryError):
            undo()
        if isinstance(error, OSError):
            raise InfraError(f"cannot write {path}: {error.strerror}; free space or choose another folder") from error
        raise
