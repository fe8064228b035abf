"""Records as a check reads them: what cannot be read becomes a few words, and values become words of a report."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corral.e2e.result import Check, Group

_LONGEST = 500  # characters of a value in a report
ABSENT = object()  # where there is no value at all, which is not the same as null


class Unreadable(ValueError):
    """A record that is not there, or not what it has to be; the text says which."""

    def check(self, group: Group, name: str) -> Check:
        return Check(group=group, name=name, expected="a whole record", found=str(self), ok=False)


def read_text(records: Path, name: str) -> str:
    """Raises Unreadable."""
    path = records / name
    try:
        if not path.is_file():
            raise Unreadable("not a file" if path.exists() else "no such file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except OSError as error:
        raise Unreadable(str(error.strerror or error)) from None


def read_json(records: Path, name: str) -> Any:
    """Raises Unreadable."""
    text = read_text(records, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}"[:200]) from None


def read_trace(records: Path) -> list[dict[str, Any]]:
    """The spans of trace.json, of the driver and of every rank. Raises Unreadable."""
    trace = read_json(records, "trace.json")
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise Unreadable("no traceEvents in it")
    return [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and isinstance(e.get("name"), str)]


def equal(group: Group, name: str, expected: object, found: object, remark: str = "") -> Check:
    """Equal and of one kind. remark: shown after what was found, when it is not."""
    # In a report, "8" and 8 look different.
    ok = _same(expected, found)
    plain = isinstance(expected, str) and (isinstance(found, str) or found is ABSENT)
    words = [cut(value) if plain and isinstance(value, str) else word(value) for value in (expected, found)]
    return Check(group=group, name=name, expected=words[0], found=words[1] + ("" if ok else remark), ok=ok)


def _same(expected: object, found: object) -> bool:
    """1 == True in Python; a plan that says true where 1 is expected is wrong, in a list too."""
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_same(expected[key], found[key]) for key in expected)
    return expected == found and isinstance(expected, bool) == isinstance(found, bool)


def nearest(name: str, names: Iterable[object]) -> str:
    """`; the nearest is 'actor/pg_loss'`, or ""."""
    near = difflib.get_close_matches(name, [str(other) for other in names], n=1, cutoff=0.6)
    return f"; the nearest is {near[0]!r}" if near else ""


def word(value: object) -> str:
    """As JSON; `nothing` where there is no value."""
    return "nothing" if value is ABSENT else cut(json.dumps(value, default=str))


def cut(text: str) -> str:
    """What a report has room for."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text)} characters)"


def as_number(value: object) -> float | None:
    """The value as float; None for what is no number, or one that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
