"""Ends a command whose agent was killed. Where no supervisor adopts what an agent leaves, it would hold its devices for
ever, and a second attempt would run beside it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

from corral.job.agent.command import polite_blocked

_SCRIPT = 'read -r over || { kill -s TERM -- "-$0"; sleep 3; kill -s KILL -- "-$0"; } 2>/dev/null'


class Guard:
    """A shell that waits for a word from this process, or for its end. group: process group of the command."""

    def __init__(self, group: int) -> None:
        read, self._write = os.pipe()
        try:
            with polite_blocked():
                self._process = subprocess.Popen(
                    ["sh", "-c", _SCRIPT, str(group)],
                    stdin=read,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
        finally:
            os.close(read)

    def dismiss(self) -> None:
        """The command is over."""
        with suppress(OSError):
            os.write(self._write, b"over\n")
        os.close(self._write)
        self._process.wait()
