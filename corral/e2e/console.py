"""What a person sees of a run, in order, on the terminal and in console.log."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import Self

from corral.errors import InfraError
from corral.job.client import github
from corral.job.client.show import OUT, PlainScreen, Screen, Writer
from corral.job.client.text import printable


class Console:
    """A context manager; all is written when its block ends. Raises InfraError when the log cannot be opened."""

    def __init__(self, log: Path) -> None:
        try:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InfraError(f"cannot write {log}: {error.strerror}") from error
        self._writer = Writer(self._log)
        self._in_actions = github.current_run() is not None

    def __enter__(self) -> Self:
        sys.stdout.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        os.close(self._log)

    def say(self, *lines: str) -> None:
        """Lines of ours, which may quote a job: nothing in them is a command to a terminal or to a CI runner."""
        text = "".join(f"{printable(line)}\n" for line in lines)
        if self._in_actions:
            token = secrets.token_hex(16)
            text = f"::stop-commands::{token}\n{text.replace('##[', '## [')}::{token}::\n"
        self._writer.write_soon([(OUT, text)])

    def screen(self, members: Set[str]) -> Screen:
        """For one job. Its outputs, summary and annotation are not GitHub's to see: those of the case are."""
        if self._in_actions:
            return github.GithubScreen(self._writer, members, env={})
        return PlainScreen(self._writer, sys.stderr.isatty())

    def flush(self) -> None:
        self._writer.flush()
