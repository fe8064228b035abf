"""What an agent says on its standard output, for the service to read there when it could not be reached.

There is the output of the command as people read it, up to ECHO bytes. While the service has not answered for OUTAGE
seconds, and at once when the command is over, everything it has not got follows as frames (protocol/frames.py), with a
heartbeat every HEART seconds.

The end record is said as soon as it is known, before anything is delivered, and again after the last frame that
followed it: what ends with an end record is whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import LineReader
from corral.job.agent.masked import MaskedReader
from corral.job.agent.output import output_files
from corral.job.agent.reach import Reach
from corral.job.agent.stdout import Stdout
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.frames import MARK, data_frames, frame

OUTAGE = 10.0  # seconds
HEART = 5.0
ECHO = 16 << 20  # bytes of readable output
LOOK = 0.25  # seconds between looks at the files
END_BOUND = 1.0  # seconds for the end record to be written
LAST_BOUND = (
    20.0  # seconds without a byte written after which the rest is let go, once the agent has nothing else to do
)
READABLE_BOUND = 2.0  # the same of what is no frame
_READ = 1 << 16


class Aside(threading.Thread):
    """stored: source → bytes that the service has. heartbeat: what the agent would tell now."""

    def __init__(
        self,
        attempt: Attempt,
        redactor: Redactor,
        reach: Reach,
        stored: Callable[[], Mapping[str, int]],
        heartbeat: Callable[[], Heartbeat],
        out: Stdout,
    ) -> None:
        super().__init__(name="aside", daemon=True)
        self._attempt, self._redactor, self._reach = attempt, redactor, reach
        self._stored, self._heartbeat, self._out = stored, heartbeat, out
        self._readers: dict[str, MaskedReader] = {}
        self._driver = output_files(attempt.driver_log, attempt.run)[0]
        self._echo_at = self._driver.size()  # that of an earlier agent was said by it
        self._echo = LineReader(self._echo_at, redactor)
        self._echoed = 0
        self._beat_at = float("-inf")
        self._end: EndRecord | None = None
        self._end_is_last = False
        self._must = False  # say what the service has not got, whether it answers or not
        self._over = False
        self._awake = threading.Event()

    def end(self, record: EndRecord, hurry: bool) -> None:
        """The command is over and its files do not grow any more. hurry: there may be no time to deliver the rest."""
        self._end, self._must = record, hurry
        self._say_end()
        if record.failure:
            self._out.put(f"corral: {record.failure}")
        self._awake.set()
        self._out.flush_urgent(END_BOUND)

    def finish(self, complete: bool) -> None:
        """complete: the service has everything. Returns when all has been said, or nobody takes it."""
        self._must = not complete
        self._over = True
        self._awake.set()
        said = -1
        while self._out.written != said and (self.is_alive() or not self._out.flush_urgent(0.0)):
            said = self._out.written
            self.join(LAST_BOUND)
            self._out.flush_urgent(LAST_BOUND)
        self._out.flush(READABLE_BOUND)

    def run(self) -> None:
        while True:
            over = self._over
            busy = self._echoes()
            busy = (self._speaks() and self._frames()) or busy
            if over and (not busy or self._out.closed):
                break
            if not busy or not self._out.room:
                self._awake.wait(0.02 if over else LOOK)
                self._awake.clear()
        if self._end is not None and not self._end_is_last:
            self._say_end()

    def _speaks(self) -> bool:
        return self._must or self._reach.longest >= (OUTAGE if self._end is None else 0.0)

    def _say_end(self) -> None:
        assert self._end is not None
        self._end_is_last = True
        self._out.put(frame(self._end), urgent=True)

    # Frames ---------------------------------------------------------------------------------------------------------

    def _frames(self) -> bool:
        """Say some of what the service has not got; whether there is more."""
        if self._end is None and time.monotonic() - self._beat_at >= HEART:
            self._beat_at = time.monotonic()
            self._out.put(frame(self._heartbeat()), urgent=True)
        stored, busy = self._stored(), False
        for file in output_files(self._attempt.driver_log, self._attempt.run):
            if not self._out.room:
                return True
            start = stored.get(file.source, 0)
            reader = self._readers.get(file.source)
            if reader is None:
                reader = self._readers[file.source] = MaskedReader(file, start, self._redactor)
            elif reader.at < start:
                reader.restart(start)
            at, content = reader.read(last=self._end is not None)
            for line in data_frames(file.source, at, content):
                self._end_is_last = False
                self._out.put(line, urgent=True)
            busy = busy or bool(content) or reader.behind
        return busy

    # What people read -----------------------------------------------------------------------------------------------

    def _echoes(self) -> bool:
        if self._echoed >= ECHO or not self._out.room:
            return False
        data = self._driver.read(self._echo_at, _READ)
        self._echo_at += len(data)
        lines = self._echo.feed(data)[0]
        if not data and self._end is not None:
            lines = self._echo.flush()[0]
        for line in lines:
            self._echoed += len(line) + 1
            self._out.put(line.replace(MARK, "# corral "))  # a job says nothing in our name
        if self._echoed >= ECHO:
            self._out.put(
                f"corral: {ECHO >> 20} MiB were shown here; `corral watch {self._attempt.spec.job_id}` has all"
            )
        return bool(data)
