"""What cases need and a corral command makes once: model folders and data sets, shared by all runs of one user.

A folder is published by renaming it, under a lock, so a half-made one is never used and two runs may start at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import corral
from corral import atomic
from corral.e2e.case import Cache, Case
from corral.e2e.process import Ended, Limit, Signals, run_to_the_end
from corral.errors import CorralError, DeadlineError, InfraError


class Interrupted(CorralError):
    """A signal arrived while a cache was prepared."""

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals.received[0].name)
        self.exit_code = 128 + signals.received[0]


class PreparationError(CorralError):
    """The command that makes a cache failed; its exit code is ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def cache_root(env: Mapping[str, str]) -> Path:
    """CORRAL_CACHE, else ~/.cache/corral."""
    chosen = env.get("CORRAL_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "corral"


def cache_key(cache: Cache) -> str:
    """Equal for the same arguments (seed included), revision and version of Corral."""
    identity = json.dumps([corral.__version__, cache.revision, list(cache.make)])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def prepare(
    case: Case, root: Path, env: Mapping[str, str], output: Callable[[bytes], object], signals: Signals
) -> dict[str, Path]:
    """The folder of each cache of the case, made now where it is missing. Raises InfraError when the folder cannot be
    written, DeadlineError, PreparationError, Interrupted."""
    folders = {}
    for name, cache in case.caches.items():
        folder = root / "e2e" / f"{name}-{cache_key(cache)}"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock"), case.deadlines.prepare, signals):
                if not folder.is_dir():
                    _make(name, cache, folder, case, env, output, signals)
        except OSError as error:
            raise InfraError(f"cannot prepare cache {name} in {folder.parent}: {error.strerror or error}") from error
        folders[name] = folder
    return folders


@contextmanager
def _lock(path: Path, seconds: float, signals: Signals) -> Iterator[None]:
    """Hold the lock file; another run may be making the same folder, for as long as that may take."""
    deadline = time.monotonic() + seconds
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if signals.received:
                    raise Interrupted(signals) from None
                if time.monotonic() > deadline:
                    raise DeadlineError(f"another run has held {path} for {seconds:g} s") from None
                time.sleep(0.1)
        yield


def _make(
    name: str,
    cache: Cache,
    folder: Path,
    case: Case,
    env: Mapping[str, str],
    output: Callable[[bytes], object],
    signals: Signals,
) -> None:
    atomic.sweep(folder.parent, folder.name)  # of a run that was killed; we hold the lock
    with atomic.new_folder(folder) as partial:
        arguments = [argument.replace("{out}", str(partial)) for argument in cache.make]
        output(f"preparing {name}: corral {' '.join(arguments)}\n".encode())
        ended = run_to_the_end(
            [sys.executable, "-m", "corral", *arguments],
            env=env,
            cwd=folder.parent,
            output=output,
            limits=[Limit(case.deadlines.prepare, f"{name} was not prepared")],
            stop_seconds=case.deadlines.stop,
            signals=signals,
        )
        _raise_unless_made(name, ended, partial, signals)


def _raise_unless_made(name: str, ended: Ended, partial: Path, signals: Signals) -> None:
    if ended.late:
        raise DeadlineError(str(ended.cut))
    if ended.cut is not None:
        raise Interrupted(signals)
    if ended.exit_code != 0:
        raise PreparationError(f"preparing cache {name} failed with exit code {ended.exit_code}", ended.exit_code)
    if not any(partial.iterdir()):
        raise PreparationError(f"preparing cache {name} made no files", 1)
