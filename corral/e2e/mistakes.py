"""What pydantic says of a case, in the words of who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from corral.e2e.case import Case


def mistakes(error: ValidationError, content: Mapping[str, Any]) -> list[tuple[Sequence[str | int], str]]:
    """(place, what is wrong), such as `topology: unknown key 'node'; the nearest is 'nodes'`. Unknown keys first: they
    are often the reason why another one is missing."""
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    return [(problem["loc"], _said(problem, content)) for problem in problems]


def _said(problem: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    place = [str(part) for part in problem["loc"]]
    message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    if problem["type"] == "extra_forbidden":
        where = ".".join(place[:-1])
        known = _keys_at(place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known)}"
        return f"{f'{where}: ' if where else ''}unknown key {place[-1]!r}; {hint}"
    if problem["type"] == "missing":
        return f"{'.'.join(place)} is missing"
    found = problem["input"]
    shown = "" if isinstance(found, dict | list) else f", found {type(found).__name__} {str(found)[:60]!r}"
    return f"{'.'.join(place) or 'it'}: {message}{shown}"


def _keys_at(place: Sequence[str]) -> list[str]:
    """The keys that may stand at a place of the document, `matrix` among them at its root."""
    model: type[BaseModel] = Case
    for part in place:
        if part in model.model_fields:  # else the name of a need
            model = next(_models(model.model_fields[part].annotation), model)
    return [*model.model_fields, *(["matrix"] if model is Case else [])]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those an annotation such as `dict[str, Need] | None` is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
