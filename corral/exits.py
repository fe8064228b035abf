"""From what happened to an exit code: the one place where errors become a line and a number.

0 done; 1 the user's code or data failed; 78 configuration; 75 infrastructure; 124 time-out; 130 SIGINT; 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from corral.errors import CorralError

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that only clean-up code sees it on its way out."""


class _State:
    """What the signal handler of the running command knows."""

    received: signal.Signals | None = None  # the first one
    on_the_spot = False
    held = False


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a CorralError is printed to stderr as one line, `error: ...`.

    SIGINT and SIGTERM are raised inside the command as KeyboardInterrupt and `Terminated`, so that `finally` blocks and
    context managers run; a signal decides the exit code whatever else it led to. Any other exception passes through:
    its traceback is for a bug in Corral or in user code, and Python exits with 1.
    """
    with _handlers():
        code = 0
        try:
            code = command()
        except KeyboardInterrupt:
            _State.received = _State.received or signal.SIGINT
        except Terminated:
            _State.received = _State.received or signal.SIGTERM
        except CorralError as error:
            if _State.received is None:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
                return error.exit_code
        except BaseException:
            if _State.received is None:
                raise
        if _State.received is None:
            return code
        print(_WORDS[_State.received], file=sys.stderr)
        return 128 + _State.received


@contextmanager
def ending_on_the_spot() -> Iterator[None]:
    """Inside, a signal ends the process at once. For imports, while nothing has been started or written yet.

    Modules that try what they can import catch everything, an interrupt too, and go on with half of it.
    """
    _State.on_the_spot = True
    try:
        yield
    finally:
        _State.on_the_spot = False


@contextmanager
def signals_held() -> Iterator[None]:
    """Inside, a signal waits for the end of the block. For short work that would leave something half-started."""
    _State.held = True
    try:
        yield
    finally:
        _State.held = False
    raise_lost_signal()


def raise_lost_signal() -> None:
    """Raise a signal again that something (a finaliser, a callback) swallowed. Called between steps of long work."""
    if _State.received is not None:
        _raise(_State.received)


@contextmanager
def _handlers() -> Iterator[None]:
    _State.received = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _WORDS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # a shell has its background jobs ignore Ctrl-C
            signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.on_the_spot:
        os.write(2, f"{_WORDS[signal.Signals(number)]}\n".encode())  # sys.stderr may be in use under this handler
        os._exit(128 + number)
    _State.received = _State.received or signal.Signals(number)
    if not _State.held:
        _raise(number)


def _raise(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated
