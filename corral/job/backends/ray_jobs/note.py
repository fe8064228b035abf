"""What the service has to remember of an attempt it gave to a cluster: that it was submitted, and that it is gone for
good. The cluster may forget both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from corral.job.backends import folder as files

NOTE = "note.json"


class Stage(StrEnum):
    """submitting: the cluster may know it. submitted: it did. destroyed: it is not to be started again."""

    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    DESTROYED = "destroyed"


@dataclass(frozen=True)
class Note:
    """session: the start of the cluster that it was given to; "" when that is not known."""

    stage: Stage
    session: str = ""


def read_note(folder: Path) -> Note | None:
    """None when nothing was noted."""
    try:
        said = json.loads(files.read(folder / NOTE))
        return Note(Stage(said["stage"]), str(said["session"]))
    except (ValueError, TypeError, KeyError):
        return None


def write_note(folder: Path, note: Note) -> None:
    """Raises InfraError when the disk refuses."""
    files.write_private(folder / NOTE, json.dumps(asdict(note)) + "\n")
