"""JSON merge patch (RFC 7396) and JSON patch (RFC 6902), as an API server applies them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


class PatchError(ValueError):
    """The patch does not fit the object."""


def merged(target: Any, patch: Any) -> Any:
    """A new value; neither argument is changed."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(copy.deepcopy(target)) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def patched(target: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """A new value; all operations or none. Raises PatchError."""
    holder = {"root": copy.deepcopy(target)}
    for operation in operations:
        try:
            _apply(holder, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PatchError(f"the operation {dict(operation)} does not apply: {error!r}") from error
    return holder["root"]


def _apply(holder: dict[str, Any], operation: Mapping[str, Any]) -> None:
    op, path = operation["op"], ["root", *_tokens(operation["path"])]
    if op == "add":
        _add(holder, path, copy.deepcopy(operation["value"]))
    elif op == "remove":
        _pop(holder, path)
    elif op == "replace":
        _pop(holder, path)
        _add(holder, path, copy.deepcopy(operation["value"]))
    elif op == "move":
        _add(holder, path, _pop(holder, ["root", *_tokens(operation["from"])]))
    elif op == "copy":
        _add(holder, path, copy.deepcopy(_at(holder, ["root", *_tokens(operation["from"])])))
    elif op == "test":
        if _at(holder, path) != operation["value"]:
            raise ValueError("test failed")
    else:
        raise ValueError(f"unknown op {op!r}")


def _tokens(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"{pointer!r} is no JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _at(holder: Any, path: Sequence[str]) -> Any:
    for token in path:
        holder = holder[int(token)] if isinstance(holder, list) else holder[token]
    return holder


def _add(holder: Any, path: Sequence[str], value: Any) -> None:
    parent, last = _at(holder, path[:-1]), path[-1]
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError(last)
        parent.insert(index, value)
    else:
        parent[last] = value


def _pop(holder: Any, path: Sequence[str]) -> Any:
    parent, last = _at(holder, path[:-1]), path[-1]
    return parent.pop(int(last)) if isinstance(parent, list) else parent.pop(last)
