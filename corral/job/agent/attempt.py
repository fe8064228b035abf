"""The folder of an attempt: what the agent finds there, and what it leaves."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from corral.errors import InfraError
from corral.job.agent.output import read_regular
from corral.job.protocol.agent import AgentSpec, EndRecord

RESERVE = 1 << 16  # bytes kept free for the end record, so that a full disk does not cost the verdict
LARGEST_END = 4 << 20  # bytes of one that is read: the sizes of thousands of ranks' output are in it


@dataclass(frozen=True)
class Attempt:
    """folder: absolute. All paths are those of docs/jobs.md."""

    folder: Path
    spec: AgentSpec

    @classmethod
    def load(cls, folder: Path) -> Attempt:
        """Raises InfraError when spec.json is not there or not one."""
        path = folder.absolute() / "spec.json"
        try:
            return cls(folder.absolute(), AgentSpec.model_validate_json(path.read_bytes()))
        except OSError as error:
            raise InfraError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:  # without the values, which may be secrets
            raise InfraError(f"{path} is no agent spec ({type(error).__name__})") from None

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def driver_log(self) -> Path:
        return self.folder / "driver.log"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def service_url(self) -> str:
        """Where the service is now; it writes service.json whenever it starts."""
        try:
            return str(json.loads(read_regular(self.folder / "service.json", 0, RESERVE))["url"])
        except (ValueError, KeyError, TypeError):
            return self.spec.service_url

    # The end record -------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Take the space of the end record. Raises InfraError when there is none."""
        try:
            with open(os.open(self._unfinished_end, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(bytes(RESERVE))
                os.fsync(file.fileno())
        except OSError as error:
            raise InfraError(f"cannot write into {self.folder}: {error.strerror}") from None

    def write_end(self, record: EndRecord) -> None:
        """The whole record or none, on the disk when this returns. Raises OSError."""
        # Written over the reserve, not into a new file: that needs no further space.
        with open(os.open(self._unfinished_end, os.O_WRONLY | os.O_CREAT, 0o600), "r+b") as file:
            file.write(record.model_dump_json().encode())
            file.truncate()
            os.fsync(file.fileno())
        self._unfinished_end.replace(self.folder / "end.json")
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read_end(self) -> EndRecord | None:
        """None when there is none, or half of one."""
        try:
            record = EndRecord.model_validate_json(read_regular(self.folder / "end.json", 0, LARGEST_END))
        except ValueError:
            return None
        return record if record.is_whole() else None

    @property
    def _unfinished_end(self) -> Path:
        return self.folder / ".end.json.unfinished"


def make_private(folder: Path) -> None:
    """Make a folder and those above it, closed to others. Raises InfraError, also when it is somebody else's: the place
    is known to everyone on the node."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InfraError(f"cannot make {error.filename}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InfraError(f"{folder} is not a folder of this user alone; remove it, or set another nodes.agent_dir")
