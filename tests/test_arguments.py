"""Numbers on the command line: what fits, and what is said when it does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from corral.arguments import positive, seconds, whole


@pytest.mark.parametrize(("read", "text", "number"), [(whole, "0", 0), (positive, "12", 12), (seconds, "0.5", 0.5)])
def test_what_fits(read: Callable[[str], float], text: str, number: float) -> None:
    assert read(text) == number


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (whole, "-1", "'-1' is not a whole number of at least 0"),
        (whole, "", "'' is not a whole number of at least 0"),
        (whole, "٣", "is not a whole number of at least 0"),
        (positive, "0", "'0' is not a whole number of at least 1"),
        (positive, "1.5", "'1.5' is not a whole number of at least 1"),
        (seconds, "0", "'0' is not a number of seconds above 0"),
        (seconds, "nan", "'nan' is not a number of seconds above 0"),
        (seconds, "inf", "'inf' is not a number of seconds above 0"),
        (seconds, "soon", "'soon' is not a number of seconds above 0"),
    ],
)
def test_what_does_not_fit(read: Callable[[str], float], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        read(text)
