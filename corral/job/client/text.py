"""Remote text made safe to show: it may hold anything, and a terminal or a CI log obeys some of it."""

from __future__ import annotations

import re

# C0 but the tab, DEL and C1: a terminal acts on them. U+2028, U+2029: some viewers break the line there.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def printable(line: str) -> str:
    """The line with every control character replaced; one line stays one line."""
    return _CONTROL.sub("\ufffd", line)


def one_line(text: str) -> str:
    """Any text as one printable line."""
    return printable(" ".join(text.split()))
