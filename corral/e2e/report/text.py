"""Text of a job made fit for any report: it may hold anything, at any length."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

# What XML and HTML have no character for, C1 controls, and marks that reorder what is shown around them.
_UNFIT = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def fit(text: str, most: int = 100_000) -> str:
    """The text with unfit characters as U+FFFD, and what it was cut by when it is longer than `most` characters."""
    cut = _UNFIT.sub("\ufffd", text[:most].replace("\r\n", "\n"))
    return f"{cut} … ({len(text) - most} further characters)" if len(text) > most else cut


def line(text: object, most: int = 500) -> str:
    """Any text as one line."""
    return fit(" ".join(str(text).split()), most)


def count(number: int, thing: str) -> str:
    """`1 check`, `2 checks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def seconds(value: float) -> str:
    """`0.24 s`, `61 s`, `12 min 5 s`, `3 h 4 min`."""
    if not math.isfinite(value):
        return "?"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{int(value // 60)} min {int(value % 60)} s" if value < 3600 else f"{minutes // 60} h {minutes % 60} min"


def moment(unix: float) -> datetime:
    """In UTC; the nearest that a calendar has, and its beginning for what is no number."""
    return datetime.fromtimestamp(min(max(unix, 0.0), 2.0**33) if math.isfinite(unix) else 0.0, UTC)


def size(value: int) -> str:
    """`512 B`, `3.4 KiB`, `12 MiB`."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def number(value: float | None) -> str:
    """Six digits, or a dash where there is none."""
    return "–" if value is None else f"{value:.6g}"
