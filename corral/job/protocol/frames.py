"""What an agent says on its standard output when the service does not answer, for the service to read there later.

A frame is one line, `#corral KIND {json}`. Ray keeps the output of a job's entrypoint, so a service that was away, or
that the nodes cannot reach, gets from there what it would have got over HTTP. Kinds:

data   raw bytes of a log source from a byte offset on, secrets masked in place, so that offsets are those of the file
heart  a Heartbeat
end    the EndRecord
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral.job.protocol.agent import EndRecord, Heartbeat

MARK = "#corral "
DATA_BYTES = 6144  # of one data frame, so that its line stays below 9000 characters: Ray cuts what it sends at 20 000


class Data(BaseModel):
    """source: as of LogChunk. raw: base64. crc: CRC-32 of the bytes."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(pattern=r"^(driver|node-[0-9]{1,4}/rank-[0-9]{1,5})$")
    start: int = Field(ge=0)
    raw: str
    crc: int


@dataclass(frozen=True)
class Bytes:
    """The bytes of a source from `start` on."""

    source: str
    start: int
    content: bytes


def data_frames(source: str, start: int, content: bytes) -> list[str]:
    """Lines, without line ends, of as many frames as it takes."""
    found = []
    for at in range(0, len(content), DATA_BYTES):
        piece = content[at : at + DATA_BYTES]
        frame = Data(source=source, start=start + at, raw=base64.b64encode(piece).decode(), crc=binascii.crc32(piece))
        found.append(f"{MARK}data {frame.model_dump_json()}")
    return found


def frame(record: Heartbeat | EndRecord) -> str:
    """A line, without line end."""
    kind = "heart" if isinstance(record, Heartbeat) else "end"
    return f"{MARK}{kind} {record.model_dump_json()}"


def parse(line: str) -> Bytes | Heartbeat | EndRecord | None:
    """What a line of output says; None for a line that is no frame, or not a whole one."""
    if not line.startswith(MARK):
        return None
    kind, _, text = line.removeprefix(MARK).partition(" ")
    try:
        if kind == "heart":
            return Heartbeat.model_validate_json(text)
        if kind == "end":
            record = EndRecord.model_validate_json(text)
            return record if record.is_whole() else None
        if kind == "data":
            data = Data.model_validate_json(text)
            content = base64.b64decode(data.raw, validate=True)
            return Bytes(data.source, data.start, content) if binascii.crc32(content) == data.crc else None
    except (ValidationError, binascii.Error, json.JSONDecodeError):
        return None
    return None
