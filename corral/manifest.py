"""One digest of a folder with all that is in it, so that copies of it on several nodes can be compared."""

from __future__ import annotations

import hashlib
import os


def manifest_digest(folder: str) -> str:
    """Hex SHA-256 over the sorted entries below `folder`: relative path, type and permission bits, and the content of a
    file or the target of a link. Links are not followed; times and owners do not count. Raises OSError.
    """
    digest = hashlib.sha256()
    for path, entry in sorted(_entries(folder, "")):
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            line = f"link {os.readlink(entry.path)}"
        elif entry.is_dir(follow_symlinks=False):
            line = f"folder {status.st_mode & 0o7777:o}"
        else:
            with open(entry.path, "rb") as file:
                line = f"file {status.st_mode & 0o7777:o} {hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest.update(os.fsencode(path) + b"\0" + os.fsencode(line) + b"\n")
    return digest.hexdigest()


def _entries(folder: str, prefix: str) -> list[tuple[str, os.DirEntry[str]]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            found.append((path, entry))
            if entry.is_dir(follow_symlinks=False):
                found += _entries(entry.path, f"{path}/")
    return found
