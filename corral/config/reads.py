"""Which fields of a Plan a run reads, and which modules read them.

A key counts as used because something read what it became, not because a list says so. Plans therefore note their own
reads: `name_fields` gives every part of a plan its place in it ("actor.optim"), and from then on each read of a field
notes the module that made it, in this process. A place travels with a part when it is sent to another process, which
keeps a record of its own. A plan without places, as tests build them, notes nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Reads = dict[str, set[str]]
"""Field by its place ("actor.optim.lr") → modules that read it."""

_OWN = ("corral.config.plan", __name__)
# Printing a plan, writing it to a file and checking it are no use of it.
_ONLOOKERS = ("corral.config.", "corral.trainer.records")
_record: Reads = defaultdict(set)


class Recorded:
    """Base of a plan's dataclasses."""

    _place = ""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_"):
            place = object.__getattribute__(self, "_place")
            if place:
                _note(f"{place}.{name}" if place != "." else name)
        return value


def _note(field: str) -> None:
    frame = sys._getframe(2)
    # A property of the plan reads fields on behalf of its caller.
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back
    reader = str(frame.f_globals.get("__name__"))
    if reader.startswith("corral.") and not reader.startswith(_ONLOOKERS):
        _record[field].add(reader)


def name_fields(plan: Recorded, place: str = ".") -> None:
    """Start noting the reads of a plan and of all its parts."""
    object.__setattr__(plan, "_place", place)
    for name, value in _items(plan).items():
        inner = name if place == "." else f"{place}.{name}"
        for number, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, Recorded):
                name_fields(part, f"{inner}.{number}" if isinstance(value, tuple) else inner)


def reads() -> Reads:
    """What was read in this process so far."""
    return {field: set(readers) for field, readers in _record.items()}


def merged(*records: Reads) -> Reads:
    """What was read in any of several processes."""
    out: Reads = {}
    for record in records:
        for field, readers in record.items():
            out[field] = out.get(field, set()) | readers
    return out


def forget() -> None:
    """Start over: a process may run several plans."""
    _record.clear()


def leaf_fields(plan: Recorded, place: str = "") -> dict[str, Any]:
    """Every field of a plan that is no plan itself, by its place."""
    out: dict[str, Any] = {}
    for name, value in _items(plan).items():
        inner = f"{place}{name}"
        if isinstance(value, Recorded):
            out |= leaf_fields(value, f"{inner}.")
        elif isinstance(value, tuple) and value and all(isinstance(part, Recorded) for part in value):
            for number, part in enumerate(value):
                out |= leaf_fields(part, f"{inner}.{number}.")
        else:
            out[inner] = value
    return out


def _items(plan: Recorded) -> Mapping[str, Any]:
    assert is_dataclass(plan)
    return {item.name: object.__getattribute__(plan, item.name) for item in fields(plan)}
