"""The agent's standard output, which Ray keeps: written by a thread, so that a reader that is stuck holds up nobody."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque

ROOM = 1 << 20  # bytes that wait to be written, of each kind
FULL = 0.5  # seconds between tries on a full disk


class Stdout(threading.Thread):
    """Lines go out whole, urgent ones first. After the other end was closed everything is dropped."""

    def __init__(self, descriptor: int = 1) -> None:
        super().__init__(name="stdout", daemon=True)
        self._descriptor = descriptor
        self._lines: tuple[deque[bytes], deque[bytes]] = deque(), deque()  # urgent ones, others
        self._waiting = [0, 0]  # bytes
        self._changed = threading.Condition()
        self._writing = False
        self.written = 0  # bytes so far
        self.closed = False

    def put(self, line: str, urgent: bool = False) -> None:
        """Returns at once. What does not fit into ROOM is for the caller to hold back: see `room`."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if not self.closed:
                self._lines[not urgent].append(data)
                self._waiting[not urgent] += len(data)
                self._changed.notify_all()

    @property
    def room(self) -> bool:
        """Whether more may be put. Always, when nothing is written any more."""
        return self.closed or sum(self._waiting) < ROOM

    def flush(self, seconds: float) -> bool:
        """Wait until all is written; False when it is not after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed or not (any(self._lines) or self._writing), seconds)

    def flush_urgent(self, seconds: float) -> bool:
        """The same for the urgent lines alone."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed or not (self._lines[0] or self._writing), seconds)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._lines))
                kind = 0 if self._lines[0] else 1
                line = self._lines[kind].popleft()
                self._writing = True
            written = self._write(line)
            with self._changed:
                self._waiting[kind] -= len(line)
                self._writing = False
                if not written:
                    self.closed = True
                    for lines in self._lines:
                        lines.clear()
                    self._waiting = [0, 0]
                self._changed.notify_all()
            if not written:
                return

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                count = os.write(self._descriptor, data)
                self.written += count
                data = data[count:]
            except BlockingIOError:  # somebody made it so
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # nobody reads
                    return False
                time.sleep(FULL)  # there may be room again
        return True
