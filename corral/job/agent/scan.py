"""Looks for the first error in all output while it is written, at its own pace: the verdict waits for no service."""

from __future__ import annotations

import time

from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import LineReader, Redactor
from corral.job.agent.output import OutputFile, output_files
from corral.job.core.first_error import FirstError, Found

READ = 1 << 18  # bytes of one file at once
LAST = 1 << 20  # bytes of each file that are still looked at when time is up


class Scanner:
    """Reads every source once, from its start, and keeps no lines."""

    def __init__(self, attempt: Attempt, redactor: Redactor) -> None:
        self._attempt, self._redactor = attempt, redactor
        self._readers: dict[str, tuple[OutputFile, LineReader, list[int]]] = {}
        self._errors = FirstError()

    def step(self, seconds: float) -> None:
        """Read on for about `seconds`, or until there is nothing new."""
        deadline = time.monotonic() + seconds
        while self._turn() and time.monotonic() < deadline:
            pass

    def finish(self, seconds: float) -> Found | None:
        """The error, once all is read; after `seconds` only the last of each file is looked at."""
        self.step(seconds)
        for file, _, at in self._readers.values():
            at[0] = max(at[0], file.size() - LAST)
        self.step(seconds)
        for file, reader, _ in self._readers.values():
            self._feed(file, reader.flush()[0])
        return self._errors.found

    def _turn(self) -> bool:
        """One read of each source; whether there was anything."""
        any_new = False
        for found in output_files(self._attempt.driver_log, self._attempt.run):
            file, reader, at = self._readers.setdefault(found.source, (found, LineReader(0, self._redactor), [0]))
            if data := file.read(at[0], READ):
                any_new = True
                at[0] += len(data)
                self._feed(file, reader.feed(data)[0])
        return any_new

    def _feed(self, file: OutputFile, lines: list[str]) -> None:
        now = time.time()
        for line in lines:
            self._errors.feed(file.source, file.node, file.rank, line, now)
