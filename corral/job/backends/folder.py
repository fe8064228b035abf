"""The folder of an attempt on a disk that the service sees: names in it, and how files get there."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from pydantic import ValidationError

from corral.atomic import undone_on_failure
from corral.job.agent.output import read_regular
from corral.job.protocol.agent import DRIVER, AgentSpec, EndRecord

SPEC = "spec.json"
SERVICE = "service.json"
END = "end.json"
AGENT_LOG = "agent.log"
DRIVER_LOG = "driver.log"
RUN = "run"
LARGEST = 1 << 22  # bytes of a file that is read whole: a spec with all it may hold

_SUBMISSION = re.compile(r"(rj-[0-9a-f]{12})-a([1-9][0-9]{0,5})")


def split(submission_id: str) -> tuple[str, int] | None:
    """Job and attempt of a submission id; None when it is not one of ours."""
    match = _SUBMISSION.fullmatch(submission_id)
    return (match[1], int(match[2])) if match else None


def attempt_folder(data_dir: Path, job_id: str, attempt: int) -> Path:
    return data_dir / "jobs" / job_id / f"attempt-{attempt}"


def submissions(data_dir: Path) -> dict[str, Path]:
    """Submission id → folder of every attempt that has one."""
    found = {}
    for folder in (data_dir / "jobs").glob("rj-*/attempt-*"):
        submission_id = f"{folder.parent.name}-a{folder.name.removeprefix('attempt-')}"
        if split(submission_id):
            found[submission_id] = folder
    return found


def make(folder: Path) -> None:
    """Make the folder of an attempt, closed to others. Raises InfraError."""
    with undone_on_failure(folder, lambda: None):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, text: str) -> None:
    """Like atomic.write_text, readable by the owner alone from its first byte on; a folder in its place is removed.

    Raises InfraError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with undone_on_failure(path, lambda: temporary.unlink(missing_ok=True)):
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        temporary.replace(path)


def remove(path: Path) -> None:
    """Whatever it is, and whether it is there or not. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path) -> bytes:
    """The content; b"" when there is no plain file. A job may put anything in the place of the files about it: a link,
    a pipe, a folder, and what it leaves must not hold up what ends it."""
    return read_regular(path, 0, LARGEST)


def write_spec(folder: Path, spec: AgentSpec) -> None:
    """Raises InfraError when the disk refuses."""
    make(folder)
    write_private(folder / SPEC, spec.model_dump_json() + "\n")
    write_service(folder, spec.service_url)


def read_spec(folder: Path) -> AgentSpec | None:
    """What the attempt was started with; None when that is not there any more."""
    try:
        return AgentSpec.model_validate_json(read(folder / SPEC))
    except ValidationError:
        return None


def write_service(folder: Path, url: str) -> None:
    """Tell the agent where the service is now. Raises InfraError when the disk refuses."""
    write_private(folder / SERVICE, json.dumps({"url": url}) + "\n")


def read_end(folder: Path, job_id: str, attempt: int) -> EndRecord | None:
    """The end record of this attempt; None when there is none, or half of one, or that of another attempt."""
    try:
        record = EndRecord.model_validate_json(read(folder / END))
    except ValidationError:
        return None
    return record if record.is_whole() and (record.job_id, record.attempt) == (job_id, attempt) else None


def sources(folder: Path) -> dict[str, Path]:
    """Log source → raw file, of all that exist. Links are left out: a job could make them lead anywhere."""
    found = {DRIVER: folder / DRIVER_LOG} if _is_plain(folder / DRIVER_LOG) else {}
    for path in sorted((folder / RUN / "logs").glob("node-*/rank-*.log")):
        source = f"{path.parent.name}/{path.stem}"
        if _RANK_SOURCE.fullmatch(source) and _is_plain(path):
            found[source] = path
    return found


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def place(source: str) -> tuple[int | None, int | None]:
    """(node, rank) of a log source; (None, None) for the driver."""
    match = _RANK_SOURCE.fullmatch(source)
    return (int(match[1]), int(match[2])) if match else (None, None)


_RANK_SOURCE = re.compile(r"node-(\d{1,4})/rank-(\d{1,5})")
