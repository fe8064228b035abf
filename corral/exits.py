"""From what happened to an exit code: the one place where errors become a line and a number.

0 done; 1 the user's code or data failed; 78 configuration; 75 infrastructure; 124 time-out; 130 SIGINT; 143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from corral.errors import CorralError


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that only clean-up code sees it on its way out."""


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a CorralError is printed to stderr as one line, `error: ...`.

    SIGTERM is raised inside the command as `Terminated`, so that `finally` blocks and context managers run. Any other
    exception passes through: its traceback is for a bug in Corral or in user code, and Python exits with 1.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if in_main else None
    try:
        return command()
    except CorralError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Terminated:
        print("terminated", file=sys.stderr)
        return 128 + signal.SIGTERM
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated
