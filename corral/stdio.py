"""The standard streams of a command: they are always open, and a reader that left or a full disk is no crash."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from corral.errors import InfraError

_READER_LEFT = 128 + signal.SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Around a command. Exits with 141, as after SIGPIPE, when the reader of stdout left (`| head`).

    Raises InfraError when what was printed cannot be written. The same errors of any other file pass through.
    """
    _open_all()
    try:
        try:
            yield
        except SystemExit:  # argparse has printed something
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE and _reader_left():
            _drop_rest()
            raise SystemExit(_READER_LEFT) from None
        if error.errno in _FULL and _takes_no_more():
            _drop_rest()
            raise InfraError(f"cannot write to stdout: {error.strerror}") from None
        raise


def _open_all() -> None:
    """Put the null device where the caller closed a descriptor (`>&-`): the next file or socket would get its number,
    and what is printed would end up in it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _takes_no_more() -> bool:
    """Whether it is stdout that is full; a line end more before a traceback, where it is not, does no harm."""
    try:
        os.write(1, b"\n")
    except OSError:
        return True
    return False


def _drop_rest() -> None:
    """What is still buffered goes nowhere, so that Python does not fail on it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
