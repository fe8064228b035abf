"""What cases need and a corral command makes once: models, data sets and recorded generations, shared by all runs of a
user and changed by none.

A folder is filled beside its place, gets a manifest of digests, is made read-only and then renamed, all under a lock:
a half-made one is never seen, and any number of runs may start at once. Whoever uses it checks it against the manifest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import corral
from corral import atomic
from corral.e2e.case import Case, Need
from corral.e2e.process import Ended, Limit, Signals, run_to_the_end
from corral.e2e.sealed import damage_of, seal, unseal
from corral.errors import ConfigError, CorralError, DeadlineError, InfraError

Say = Callable[[str], object]  # takes one line
_PLAIN = re.compile(r"[\w@%+=:,./{}-]+")  # needs no quotes; the braces are ours
_ENVIRONMENT = re.compile(r"\{env\.(\w+)\}")


class Interrupted(CorralError):
    """A signal arrived while something was prepared."""

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals.received[0].name)
        self.exit_code = 128 + signals.received[0]


class PreparationError(CorralError):
    """The command that makes a need failed; its exit code is ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def cache_root(chosen: Path | None, env: Mapping[str, str]) -> Path:
    """The folder that was chosen, else CORRAL_CACHE, else ~/.cache/corral. Raises ConfigError without a home."""
    folder = os.path.expanduser(chosen or env.get("CORRAL_CACHE") or "~/.cache/corral")
    if folder.startswith("~"):
        raise ConfigError(
            f"cannot keep a cache in {folder}: no such home folder; CORRAL_CACHE or --cache names another"
        )
    return Path(folder).absolute()


def need_key(need: Need, env: Mapping[str, str] = os.environ) -> str:
    """Equal for the same arguments (seed included), revision and version of Corral."""
    return _key([corral.__version__, need.revision, [_filled(text, env) for text in need.make or ()]])


def look_up(case: Case, root: Path) -> dict[str, Path]:
    """Where each need lies, or would lie: nothing is made or looked for. Raises ConfigError for an `{env.NAME}` that is
    not set."""
    found = {}
    for name, need in case.needs.items():
        with _named(case, name):
            if need.path is not None:
                found[name] = Path(os.path.expanduser(_filled(need.path, os.environ))).absolute()
            else:
                found[name] = root / "e2e" / f"{name}-{need_key(need)}"
    return found


def require(case: Case, root: Path) -> dict[str, Path]:
    """The needs, all of them there and as they were made; nothing is made. Raises ConfigError that says what to do."""
    folders = look_up(case, root)
    for name, folder in folders.items():
        _require(case, name, folder)
    return folders


def prepare(case: Case, root: Path, say: Say, signals: Signals) -> dict[str, Path]:
    """The folder of each need, made now where it is missing; one that was changed is named and made anew.

    say takes one line at a time, from another thread too. Raises ConfigError for a `path` that is not there, InfraError
    when the cache cannot be written, DeadlineError, PreparationError, Interrupted.
    """
    folders = look_up(case, root)
    for name, folder in folders.items():
        if case.needs[name].path is not None:
            _require(case, name, folder)
            continue
        try:
            _prepare(case, name, folder, say, signals)
        except OSError as error:
            raise InfraError(
                f"case {case.name}: cannot make need {name} in {folder.parent}: {error.strerror or error}; "
                "CORRAL_CACHE or --cache names another folder"
            ) from error
    return folders


def rollouts_folder(case: Case, root: Path) -> Path:
    """Where the recorded generations of a case lie: one folder for all that decides what is generated."""
    assert case.rollouts is not None
    needs = {
        name: folder.name if case.needs[name].make else str(folder) for name, folder in look_up(case, root).items()
    }
    what = [corral.__version__, case.rollouts.revision, case.script, case.command, case.args, case.env, needs]
    return root / "e2e" / f"rollouts-{case.name}-{_key([*what, case.rollouts.steps])}"


def rollouts_in(case: Case, root: Path, say: Say | None = None) -> Path | None:
    """The recorded generations, when there are some and they are as they were recorded. A changed folder is named to
    `say` and not used: the run that follows records anew."""
    folder = rollouts_folder(case, root)
    damage = damage_of(folder)
    if damage and folder.exists() and say is not None:
        say(f"rollouts {folder} are not used: {damage}; they are recorded anew")
    return None if damage else folder


def publish_rollouts(case: Case, root: Path, recorded: Path) -> Path | None:
    """Keep what a run recorded for later ones; one of two runs that end at once does. None when a step is missing from
    the recording, or a whole one is there already. The folders of the steps may lie below folders named by the run;
    they keep their place. Raises InfraError."""
    assert case.rollouts is not None
    folder, steps = rollouts_folder(case, root), [str(step) for step in case.rollouts.steps]
    at = _folder_of(steps, recorded)
    if at is None:
        return None
    try:
        with _lock(folder, 60.0, None):
            if not damage_of(folder):
                return None
            with _replaced(folder) as partial:
                for step in steps:
                    shutil.copytree(recorded / at / step, partial / at / step)
                seal(partial, {"recorded by": f"case {case.name}"})
    except OSError as error:
        raise InfraError(f"cannot keep rollouts in {folder.parent}: {error.strerror or error}") from error
    return folder


def _folder_of(steps: list[str], recorded: Path) -> Path | None:
    """The outermost folder that has all of them, relative to the recording."""
    folders = [recorded, *(folder for folder in recorded.rglob("*") if folder.is_dir())]
    whole = [folder for folder in folders if all((folder / step).is_dir() for step in steps)]
    return min(whole, key=lambda folder: len(folder.parts)).relative_to(recorded) if whole else None


def _key(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _filled(text: str, env: Mapping[str, str]) -> str:
    """With `{env.NAME}` replaced. Raises KeyError of the name."""
    return _ENVIRONMENT.sub(lambda match: env[match[1]], text)


@contextmanager
def _named(case: Case, name: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise ConfigError(
            f"case {case.name}: need {name} is found through ${error.args[0]}, which is not set{_about(case, name)}"
        ) from None


def _require(case: Case, name: str, folder: Path) -> None:
    need = case.needs[name]
    if need.path is not None:
        if not folder.exists():
            raise ConfigError(
                f"case {case.name}: need {name}: no folder {folder}; nothing makes it{_about(case, name)}"
            )
        return
    if damage := damage_of(folder):
        what = f"is not in the cache: no folder {folder}" if not folder.exists() else f"was changed: {folder}: {damage}"
        raise ConfigError(
            f"case {case.name}: need {name} {what} (key {need_key(need)}: {_command(need)}, revision {need.revision}, "
            f"corral {corral.__version__}); make it with `corral e2e prepare {case.name}`"
        )


def _about(case: Case, name: str) -> str:
    about = case.needs[name].about
    return f"; {about}" if about else ""


def _command(need: Need) -> str:
    words = (word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in need.make or ())
    return f"corral {' '.join(words)}"


def _prepare(case: Case, name: str, folder: Path, say: Say, signals: Signals) -> None:
    if not damage_of(folder):
        return  # without the lock: a cache that is filled may be read-only
    with _lock(folder, case.deadlines.prepare, signals):
        if not (damage := damage_of(folder)):
            return
        if folder.exists():
            say(f"need {name}: {folder}: {damage}; it is made anew")
        with _replaced(folder) as partial:
            # Named as the folder it becomes: the partial one is gone when the line is read.
            _make(case, name, partial, lambda line: say(line.replace(str(partial), str(folder))), signals)


@contextmanager
def _lock(folder: Path, seconds: float, signals: Signals | None) -> Iterator[None]:
    """Hold the lock of a cache folder; another run may be making it, for as long as that may take."""
    deadline = time.monotonic() + seconds
    path = folder.with_name(f"{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if signals is not None and signals.received:
                    raise Interrupted(signals) from None
                if time.monotonic() > deadline:
                    raise DeadlineError(f"another run has held {path} for {seconds:g} s") from None
                time.sleep(0.1)
        yield


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of the old one; only under its lock. What a killed run left is removed."""
    for leftover in (*folder.parent.glob(f".{folder.name}.*"), folder):
        unseal(leftover)  # else only root could remove it
    atomic.sweep(folder.parent, folder.name)
    with atomic.new_folder(folder) as partial:
        yield partial


def _make(case: Case, name: str, partial: Path, say: Say, signals: Signals) -> None:
    need = case.needs[name]
    arguments = [_filled(argument, os.environ).replace("{out}", str(partial)) for argument in need.make or ()]
    say(f"preparing {name}: {_command(need)}")
    lines = _Lines(say)
    ended = run_to_the_end(
        [sys.executable, "-m", "corral", *arguments],
        env=os.environ,
        cwd=partial.parent,
        output=lines.add,
        limits=[Limit(case.deadlines.prepare, f"case {case.name}: need {name} was not made")],
        stop_seconds=case.deadlines.stop,
        signals=signals,
    )
    lines.end()
    _raise_unless_made(f"case {case.name}: need {name}", ended, partial, lines.last + _about(case, name), signals)
    seal(partial, {"made by": _command(need), "key": need_key(need)})


def _raise_unless_made(what: str, ended: Ended, partial: Path, last: str, signals: Signals) -> None:
    if ended.late:
        raise DeadlineError(f"{ended.cut}; deadlines.prepare sets another limit")
    if ended.cut is not None:
        raise Interrupted(signals)
    if ended.exit_code != 0:
        said = f": {last.removeprefix('error: ')}" if last else ""
        raise PreparationError(f"{what} was not made, exit code {ended.exit_code}{said}", ended.exit_code)
    if not any(partial.iterdir()):
        raise PreparationError(f"{what}: its command made no files", 1)


class _Lines:
    """Output in chunks, given on in lines."""

    def __init__(self, say: Say) -> None:
        self._say, self._rest, self.last = say, b"", ""

    def add(self, chunk: bytes) -> None:
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            self._line(line)

    def end(self) -> None:
        if self._rest:
            self._line(self._rest)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]  # of a progress bar its last state
        self.last = text.strip() or self.last
        self._say(text)
