"""Label and field selectors in kubectl's notation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Matches = Callable[[Mapping[str, Any]], bool]

_SET = re.compile(r"^([\w./-]+)\s+(in|notin)\s+\(([^)]*)\)$")
_EQUAL = re.compile(r"^([\w./-]+)\s*(==|=|!=)\s*([\w./:-]*)$")
_NAME = re.compile(r"^(!?)([\w./-]+)$")


def labels(selector: str) -> Matches:
    """Raises ValueError for what is no selector."""
    terms = [_term(part.strip()) for part in re.split(r",(?![^(]*\))", selector) if part.strip()]
    return lambda thing: all(term((thing.get("metadata") or {}).get("labels") or {}) for term in terms)


def fields(selector: str) -> Matches:
    """Raises ValueError for what is no selector."""
    terms = [_EQUAL.match(part.strip()) for part in selector.split(",") if part.strip()]
    if None in terms:
        raise ValueError(f"{selector!r} is no field selector")
    return lambda thing: all(
        (_value(thing, term[1]) == term[3]) is (term[2] != "!=") for term in terms if term is not None
    )


def _value(thing: Any, path: str) -> str:
    for part in path.split("."):
        thing = thing.get(part) if isinstance(thing, Mapping) else None
    return "" if thing is None else str(thing)


def _term(text: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(text):
        name, wanted = found[1], {value.strip() for value in found[3].split(",")}
        if found[2] == "in":
            return lambda given: given.get(name) in wanted
        return lambda given: given.get(name) not in wanted
    if found := _EQUAL.match(text):
        name, value = found[1], found[3]
        return (
            (lambda given: given.get(name) != value) if found[2] == "!=" else (lambda given: given.get(name) == value)
        )
    if found := _NAME.match(text):
        name, absent = found[2], found[1] == "!"
        return lambda given: (name in given) is not absent
    raise ValueError(f"{text!r} is no label selector")
