"""Folders that are not to change: read-only, with a manifest of digests they are checked against when they are used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

MANIFEST = ".corral-manifest.json"
_VERSION = 1


def seal(folder: Path, origin: Mapping[str, str]) -> None:
    """Write the manifest of a folder and take the right to write from everybody. origin: words on where it is from."""
    files = {path: _digest(folder / path) for path in sorted(_files(folder))}
    text = json.dumps({"version": _VERSION, **origin, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    _chmod(folder, lambda mode: mode & ~0o222)


def unseal(folder: Path) -> None:
    """Give the owner the right to write, and so to remove it; nothing to do where there is no folder."""
    _chmod(folder, lambda mode: mode | 0o200)


def damage_of(folder: Path) -> str:
    """What is wrong with a sealed folder, in a few words: the first file that was changed, added or removed; "" when it
    is whole. Reads every byte of it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, files = manifest["version"], dict(manifest["files"])
    except FileNotFoundError:
        return "it has no manifest" if folder.is_dir() else "no such folder"
    except OSError as error:
        return f"its manifest cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "its manifest is damaged"
    if version != _VERSION:
        return f"its manifest has version {version}, expected {_VERSION}"
    found = set(_files(folder))
    if missing := sorted(files.keys() - found):
        return f"{missing[0]} is missing"
    if added := sorted(found - files.keys()):
        return f"{added[0]} was added"
    for path, expected in sorted(files.items()):
        try:
            if _digest(folder / path) != expected:
                return f"{path} was changed"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return ""


def _files(folder: Path) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*names, *links):
            path = os.path.relpath(os.path.join(place, name), folder)
            if path != MANIFEST:
                yield path


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if not path.is_file():
        return "no file"  # to open a pipe would wait for whoever writes to it
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chmod(folder: Path, change: Callable[[int], int]) -> None:
    """Folders first, so that what is in them can be reached; links are left alone."""
    if not folder.is_dir() or folder.is_symlink():
        return
    folder.chmod(change(folder.stat().st_mode & 0o7777))
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(change(path.stat().st_mode & 0o7777))
