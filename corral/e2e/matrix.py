"""The matrix of a case file: one case for each combination of its values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from corral.e2e.document import Document
from corral.e2e.placeholders import RESERVED
from corral.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MOST = 256  # combinations: each is a case


def expanded(document: Document) -> Iterator[dict[str, Any]]:
    """The content of each case, with the values of its combination in place and in its name. Raises ConfigError."""
    content = dict(document.content)
    matrix = _checked(content.pop("matrix", {}), content, document)
    for values in (dict(zip(matrix, combination, strict=True)) for combination in itertools.product(*matrix.values())):
        filled = _fill(content, values)
        name = content.get("name")
        if isinstance(name, str):
            missing = [key for key in values if f"{{{key}}}" not in name]
            filled["name"] = "-".join([_text(_fill(name, values)), *(_part(key, values[key]) for key in missing)])
        yield filled


def _checked(matrix: object, content: Mapping[str, Any], document: Document) -> dict[str, list[Any]]:
    where = document.at(("matrix",))
    if not isinstance(matrix, dict):
        raise ConfigError(f"{where}: matrix: has to be name: [value, ...], such as sp: [1, 2]")
    needs = content.get("needs")
    for key, values in matrix.items():
        where = document.at(("matrix", str(key)))
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ConfigError(f"{where}: matrix: {key!r} is no name; use small letters, digits and _")
        if key in RESERVED or (isinstance(needs, dict) and key in needs):
            raise ConfigError(f"{where}: matrix: {{{key}}} stands for something else already; choose another name")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: matrix: {key} has to be a list of values, such as [1, 2]")
        if not all(isinstance(value, str | int | float) for value in values):
            raise ConfigError(f"{where}: matrix: {key} has to be a list of texts, numbers or true and false")
    if (count := math.prod(map(len, matrix.values()))) > _MOST:
        raise ConfigError(f"{document.at(('matrix',))}: matrix: {count} combinations, the limit is {_MOST}; split it")
    return matrix


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """`{sp}` alone becomes the value itself, inside a text its text. Other braces are left alone."""
    if isinstance(value, dict):
        return {_fill(key, values): _fill(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_fill(part, values) for part in value]
    if not isinstance(value, str):
        return value
    for name, given in values.items():
        if value == f"{{{name}}}":
            return given
        value = value.replace(f"{{{name}}}", _text(given))
    return value


def _text(value: Any) -> str:
    """true as YAML and JSON write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _part(key: str, value: Any) -> str:
    """`sp-2`: what a name may hold."""
    return f"{key}-{re.sub('[^a-z0-9.]+', '-', _text(value).lower()).strip('-')}".replace("_", "-")
