"""Numbers on the command line, as `type=` of argparse: a value that does not fit is answered with what would."""

from __future__ import annotations

import argparse
import math


def whole(text: str) -> int:
    """0, 1, 2, ..."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """1, 2, ..."""
    return _at_least(1, text)


def seconds(text: str) -> float:
    """Above 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def _at_least(least: int, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
