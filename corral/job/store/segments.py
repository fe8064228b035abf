"""Append-only files of encoded log lines: `<data_dir>/jobs/<job_id>/segments/NNNNNN.ndjson`.

The database says which bytes count. Bytes after those are of a write that was never finished: they are cut off before
the file is written to again. A file that is shorter than the database says (a loss of power) is never written to again:
the next line goes into a new one, and what is missing is told as lost to whoever reads it.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from corral.errors import InfraError

ROLL = 64 << 20
OPEN_FILES = 128


@dataclass(frozen=True)
class Place:
    """Where the next byte goes. missing: bytes that the segment before should have and has not."""

    segment: int
    end: int
    missing: int = 0


class Segments:
    """Of all jobs. Writers take turns (the store sees to it); readers need nothing."""

    def __init__(self, jobs: Path, roll: int = ROLL) -> None:
        self._jobs = jobs
        self._roll = roll
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()  # job id → (segment, file descriptor)

    def ready(self, job_id: str, segment: int, end: int) -> Place:
        """Open the segment that holds `end` bytes which count, or the next one when it is full or damaged."""
        with self._said(job_id):
            if end >= self._roll:
                return self._next(job_id, segment, 0)
            held = self._files.get(job_id)
            if held is not None and held[0] == segment:
                self._files.move_to_end(job_id)
                return Place(segment, end)
            file = self._open(job_id, segment)
            size = os.fstat(file).st_size
            if size < end:
                return self._next(job_id, segment, end - size)
            if size > end:
                os.ftruncate(file, end)
            return Place(segment, end)

    def write(self, job_id: str, place: Place, data: bytes) -> Place:
        """Write to a place that is ready; nothing counts before the database says so."""
        with self._said(job_id):
            _, file = self._files[job_id]
            view, offset = memoryview(data), place.end
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written
        return Place(place.segment, offset)

    def read(self, job_id: str, segment: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes: fewer when the file has not got them."""
        try:
            file = os.open(self._path(job_id, segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(file, length, offset)
        finally:
            os.close(file)

    def drop_unindexed(self, job_id: str, segment: int) -> bool:
        """Delete segments after this one, which a killed service began; whether this one exists."""
        path = self._path(job_id, segment)
        with self._said(job_id):
            for later in path.parent.glob("*.ndjson"):
                if later.name > path.name:
                    later.unlink()
        return path.exists()

    def finish(self, job_id: str, segment: int) -> None:
        """Close the job's last segment after its bytes are on the disk."""
        if job_id not in self._files and self._path(job_id, segment).exists():
            with self._said(job_id):
                self._open(job_id, segment)
        self.forget(job_id, sync=True)

    def forget(self, job_id: str, sync: bool = False) -> None:
        """Close the job's file; sync: after its bytes are on the disk."""
        held = self._files.pop(job_id, None)
        if held is None:
            return
        try:
            if sync:
                with self._said(job_id):
                    os.fsync(held[1])
        finally:
            os.close(held[1])

    def remove(self, job_id: str) -> None:
        """Delete the segments of a job, and its folder when nothing else is in it."""
        self.forget(job_id)
        folder = self._jobs / job_id / "segments"
        with self._said(job_id):
            if folder.exists():
                shutil.rmtree(folder)
        with suppress(OSError):
            folder.parent.rmdir()

    def close(self) -> None:
        for job_id in list(self._files):
            self.forget(job_id)

    def _next(self, job_id: str, segment: int, missing: int) -> Place:
        self.forget(job_id, sync=True)
        os.ftruncate(self._open(job_id, segment + 1), 0)
        return Place(segment + 1, 0, missing)

    def _open(self, job_id: str, segment: int) -> int:
        self.forget(job_id)
        path = self._path(job_id, segment)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files[job_id] = (segment, file)
        if len(self._files) > OPEN_FILES:
            self.forget(next(iter(self._files)), sync=True)
        return file

    def _path(self, job_id: str, segment: int) -> Path:
        return self._jobs / job_id / "segments" / f"{segment:06d}.ndjson"

    @contextmanager
    def _said(self, job_id: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InfraError(
                f"cannot store output of job {job_id}: {error.strerror}; free space in {self._jobs}"
            ) from error
