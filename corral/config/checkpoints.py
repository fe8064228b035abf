"""Which checkpoint a run goes on from: names and places on disk, readable in a millisecond and without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.errors import ConfigError, DataError

FORMAT = 1
PREFIX = "global_step_"
LATEST = "latest_checkpointed_iteration.txt"
"""The step of the newest checkpoint, written last."""
STATE = "trainer.json"
"""What the driver needs to go on: beside the folders of the roles."""
RESUMABLE = ("model", "optimizer", "extra")
"""What a checkpoint has to hold for a run to go on from it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder global_step_N that a run can go on from, and the content of its trainer.json."""

    folder: Path
    step: int
    state: dict[str, Any]


def resumable(contents: tuple[str, ...]) -> bool:
    """Whether a run can go on from a checkpoint with these parts."""
    return set(RESUMABLE) <= set(contents)


def find(mode: str, path: str | None, checkpoint_dir: str) -> Checkpoint | None:
    """The checkpoint of trainer.resume_mode, resume_from_path and default_local_dir; None: start from the model folder.

    ConfigError: resume_path leads to none. DataError: a checkpoint that is there cannot be used.
    """
    if mode == "resume_path":
        folder = Path(path or "")
        if not folder.is_dir():
            raise ConfigError(f"trainer.resume_from_path={path} is not a folder; give one named {PREFIX}N")
        return _read(folder)
    if mode == "auto":
        step = latest(Path(checkpoint_dir))
        return None if step is None else _read(Path(checkpoint_dir) / f"{PREFIX}{step}")
    return None


def latest(checkpoint_dir: Path) -> int | None:
    """The step of the newest checkpoint that a run can go on from; None when there is none."""
    tracker = checkpoint_dir / LATEST
    try:
        return int(tracker.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {tracker}: {error.strerror}; {_FIX}") from error
    except ValueError as error:
        raise DataError(f"{tracker} does not hold the number of a step; {_FIX}") from error


_FIX = "set trainer.resume_mode=disable to start from the model folder, or resume_path with trainer.resume_from_path"


def steps_on_disk(checkpoint_dir: Path) -> dict[int, Path]:
    """Step → folder, in order of the steps."""
    found = {}
    for folder in checkpoint_dir.glob(f"{PREFIX}*"):
        number = folder.name.removeprefix(PREFIX)
        if number.isdecimal():
            found[int(number)] = folder
    return dict(sorted(found.items()))


def _read(folder: Path) -> Checkpoint:
    file = folder / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{folder} is no checkpoint: {STATE}: {error.strerror}; {_FIX}") from error
    except ValueError as error:
        raise DataError(f"{file} is damaged: it is not JSON; {_FIX}") from error
    try:
        made_by, step, contents, roles = (state[name] for name in ("format", "global_step", "contents", "roles"))
        if made_by != FORMAT or not isinstance(step, int):
            raise DataError(
                f"{file} has format {made_by!r} and step {step!r}, this version reads format {FORMAT}; {_FIX}"
            )
        can_resume, parts = resumable(tuple(contents)), [folder / role for role in roles]
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is not that of a checkpoint; {_FIX}") from error
    if not can_resume:
        raise DataError(f"{folder} holds {', '.join(contents)}: a run goes on only from {', '.join(RESUMABLE)}; {_FIX}")
    for part in parts:
        if not part.is_dir():
            raise DataError(f"{folder} has no {part.name}: it was removed after the save; {_FIX}")
    return Checkpoint(folder, step, state)
