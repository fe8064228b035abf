"""Which files of a source folder go to the job."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from corral.errors import ConfigError

MAX_FILES = 50_000

# What the repository's own configuration could make git run, and an owner that differs inside containers.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
_LEFT_OUT_DIRS = frozenset({"__pycache__", "node_modules"})


@dataclass
class Listing:
    """paths: relative to root, POSIX, sorted, regular files and symbolic links that stay inside.
    notices: one line each, about what was left out. placed: further files, by their path in the source."""

    root: Path
    paths: list[str]
    in_git: bool
    notices: list[str] = field(default_factory=list)
    placed: dict[str, Path] = field(default_factory=dict)

    def files(self) -> dict[str, Path]:
        """Path in the source → file on this disk, sorted."""
        return dict(sorted(({path: self.root / path for path in self.paths} | self.placed).items()))


def source_root(folder: Path | None) -> Path:
    """The folder a job's source is taken from: the one given, else the git working tree around the current folder,
    else the current folder. Raises ConfigError when it is no folder."""
    if folder is None:
        top = _git(Path.cwd(), "rev-parse", "--show-toplevel")
        return Path(os.fsdecode(top.rstrip(b"\n"))).resolve() if top else Path.cwd()
    if not folder.is_dir():
        raise ConfigError(f"--source {folder} is not a folder")
    return folder.resolve()


def list_files(root: Path) -> Listing:
    """Tracked and untracked-not-ignored files of a git working tree; outside one all but hidden files, caches and
    virtual environments, with a notice. Tracked files that are deleted are left out; submodules are followed.

    Raises ConfigError for a name that no archive can carry, and for more than MAX_FILES files.
    """
    in_git = (_git(root, "rev-parse", "--is-inside-work-tree") or b"").strip() == b"true"
    listing = Listing(root, [], in_git)
    found = _in_git(root, "", listing) if in_git else _in_folder(root)
    if not in_git:
        listing.notices.append(
            f"{root} is not a git working tree: all its files are sent but hidden ones, caches and virtual environments"
        )
    paths: set[str] = set()
    outside = []
    for name in found:
        path = _checked(name)
        kind = _kind(root, path)
        if kind == "outside":
            outside.append(path)
        elif kind == "file":
            paths.add(path)
        if len(paths) > MAX_FILES:
            raise ConfigError(f"{root} has more than {MAX_FILES} files; ignore some in .gitignore or give --source")
    if outside:
        listing.notices.append(f"links that leave the source are left out: {_some(sorted(outside))}")
    listing.paths = sorted(paths)
    return listing


def git_head(root: Path) -> tuple[str, str] | None:
    """(commit, branch) of a working tree; branch is "" when HEAD is detached; None without a commit."""
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    branch = (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b"").decode(errors="replace").strip()
    return commit.decode().strip(), "" if branch == "HEAD" else branch


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command; None where it fails or there is no git."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run([*_GIT, "-C", str(folder), *arguments], capture_output=True, check=False, env=env)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _in_git(folder: Path, prefix: str, listing: Listing) -> Iterator[str]:
    listed = _git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    if listed is None:
        raise ConfigError(f"git cannot list the files of {folder}; see `git -C {folder} ls-files`")
    for raw in dict.fromkeys(listed.split(b"\0")):
        name = os.fsdecode(raw)
        if not name:
            continue
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            yield prefix + name
        elif name.endswith("/"):
            listing.notices.append(f"{prefix}{name} is a git repository of its own and not tracked: left out")
        elif (path / ".git").exists():
            yield from _in_git(path, f"{prefix}{name}/", listing)
        else:
            listing.notices.append(f"submodule {prefix}{name} is not checked out: left out")


def _in_folder(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = sorted(
            name
            for name in folders
            if name not in links
            and name not in _LEFT_OUT_DIRS
            and not name.startswith(".")
            and not os.path.exists(here / name / "pyvenv.cfg")
            and not _ignores_itself(here / name)
        )
        for name in [*files, *links]:
            if not name.startswith("."):
                yield str((here / name).relative_to(root))


def _ignores_itself(folder: Path) -> bool:
    """Virtual environments, caches of tools and folders of runs hold a `.gitignore` of one star."""
    try:
        with open(folder / ".gitignore", "rb") as file:
            return b"*" in [line.strip() for line in file.read(1024).splitlines()]
    except OSError:
        return False


def _unreadable(error: OSError) -> NoReturn:
    """Said, not left out: a job without files that its submitter sees would fail much later."""
    raise ConfigError(f"the source cannot be read: {error.filename}: {error.strerror}; give a narrower --source")


def _checked(name: str) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"file name {name!r} is not UTF-8; rename the file or ignore it in .gitignore") from None
    if "\\" in name or len(name) > 1024:
        raise ConfigError(f"file name {name[:80]!r} holds a backslash or is over 1024 characters; rename or ignore it")
    return name


def _kind(root: Path, path: str) -> str:
    """file: send it. outside: a link that leaves the source. gone: deleted, or nothing that can be sent."""
    full = root / path
    try:
        mode = full.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    except OSError as error:
        _unreadable(error)
    if stat.S_ISLNK(mode):
        target = os.readlink(full)
        named = os.path.normpath(full.parent / target)
        inside = not os.path.isabs(target) and _is_below(named, root) and _is_below(os.path.realpath(full), root)
        return "file" if inside else "outside"
    return "file" if stat.S_ISREG(mode) else "gone"


def _is_below(path: str, root: Path) -> bool:
    return Path(path).is_relative_to(os.path.realpath(root)) or Path(path).is_relative_to(root)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
