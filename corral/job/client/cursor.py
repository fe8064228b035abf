"""From the bytes of a watch to events, each exactly once and in order, whatever a connection loses or repeats."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]

MAX_LINE = 16 << 20  # bytes; an agent splits lines at 64 KiB, so more without a line break is no event


class Cursor:
    """What has been seen of one job.

    seq: of the last event that was handed out; a new connection asks for what comes after it. gapless: every event is
    asked for, so a jump in the sequence numbers means that something was lost on the way. broken: why nothing more of
    this connection can be used. jump: the sequence number it broke at, when it was a jump.
    """

    def __init__(self, after_seq: int = 0, gapless: bool = True) -> None:
        self.seq = after_seq
        self.gapless = gapless
        self.broken: str | None = None
        self.jump: int | None = None
        self.final: Event | None = None
        self._rest = b""

    def connected(self) -> None:
        """A new connection: half a line of the old one never completes."""
        self._rest = b""
        self.broken = None
        self.jump = None

    def accept_jump(self) -> None:
        """Go on behind a jump that every connection shows: the service itself has nothing there."""
        if self.jump is not None:
            self.seq = self.jump - 1

    def feed(self, data: bytes) -> list[Event]:
        """The new events of complete lines, in order. Nothing after `final`, and nothing once `broken` is set."""
        if self.final is not None or self.broken is not None:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self.broken = f"a line of more than {MAX_LINE} bytes"
        events: list[Event] = []
        for line in lines:
            if not line.strip():  # a keep-alive
                continue
            event = _decoded(line)
            if event is None:
                self.broken = f"a line that is no event after event {self.seq}"
                break
            seq = event["seq"]
            if seq <= self.seq:
                continue
            if self.gapless and seq != self.seq + 1:
                self.jump = seq
                self.broken = f"event {seq} came after event {self.seq}"
                break
            self.seq = seq
            events.append(event)
            if event["type"] == "final":
                self.final = event
                break
        return events


def _decoded(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or type(event.get("seq")) is not int or not isinstance(event.get("type"), str):
        return None
    return event
