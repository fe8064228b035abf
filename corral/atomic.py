"""Files and folders that are whole or absent: written beside their place, then renamed.

What the disk refuses becomes one line.
"""

from __future__ import annotations

import os
import secrets
import shutil
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
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, put at `path` when the block ends, in place of what was there.

    All of it is on disk by then. A block that fails, and a kill at any time, leave `path` as it was; only a kill in
    the instant between the two renames that replace an older folder leaves none. What a kill leaves is removed by
    `sweep`. OSError passes through: callers know what was to be written.
    """
    path = path.absolute()
    mark = secrets.token_hex(4)
    # A leading dot keeps a half-made folder from ever being taken for one.
    fresh, old = (path.with_name(f".{path.name}.{kind}-{mark}") for kind in ("new", "old"))
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _flush(fresh)
        if os.path.lexists(path):
            os.rename(path, old)  # a folder cannot replace a full one in one call
        os.rename(fresh, path)
        _flush_entry(path.parent)
    finally:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        for leftover in (fresh, old):
            _remove(leftover)


def remove_folder(path: Path) -> None:
    """Remove a folder so that it is whole or absent to everyone else; nothing to do where there is none."""
    gone = path.with_name(f".{path.name}.old-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, gone)
    _remove(gone)


def sweep(folder: Path, name: str) -> None:
    """Remove what killed calls of `new_folder` and `remove_folder` left in `folder` for a glob pattern of names.

    Only for whoever alone writes there: it would take the folder another process is just filling.
    """
    for kind in ("new", "old"):
        for leftover in folder.glob(f".{name}.{kind}-*"):
            _remove(leftover)


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


def _flush(folder: Path) -> None:
    """Files before the folders that name them."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in sorted(names):
            _flush_entry(Path(place) / name)
        _flush_entry(Path(place))


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
