"""The reference of all keys: for the terminal, as JSON, and as the page docs/keys.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from corral.config.aliases import ALIASES, BLOCK_ALIASES
from corral.config.overrides import nearest_key
from corral.config.schema.root import Config, leaves
from corral.config.section import Leaf, Section
from corral.errors import ConfigError

_PAGE = """# All keys

Written by `corral config --markdown`; `corral config PATTERN` prints the keys that hold the pattern. How to write
values and read the plan: [configuration.md](configuration.md).

A default such as `${key}` is the value of that key, `${.key}` of one in the same section. Open blocks take any key
below them.
"""


def select(pattern: str | None) -> dict[str, Leaf]:
    """The keys that hold the pattern, whatever the case, all of them without one.

    Raises ConfigError, with the nearest key, when none does.
    """
    found = {name: leaf for name, leaf in leaves().items() if pattern is None or pattern.lower() in name.lower()}
    if pattern is not None and not found:
        raise ConfigError(f"no key holds {pattern!r}; the nearest known key is {nearest_key(pattern)!r}")
    return found


def as_text(keys: dict[str, Leaf]) -> str:
    """Two lines a key: name, type, default; meaning."""
    return "\n".join(
        f"{name}  {_type(leaf)}  {_default(leaf)}{f'  [{leaf.unit}]' if leaf.unit else ''}\n    {leaf.doc}"
        for name, leaf in keys.items()
    )


def as_json(keys: dict[str, Leaf]) -> str:
    """A list of {key, type, default, unit, meaning, aliases}."""
    return json.dumps(
        [
            {
                "key": name,
                "type": _type(leaf),
                "default": leaf.default,
                "unit": leaf.unit,
                "meaning": leaf.doc,
                "aliases": _spellings(name),
            }
            for name, leaf in keys.items()
        ],
        indent=2,
    )


def as_markdown() -> str:
    """docs/keys.md: a table for each section."""
    parts = [_PAGE]
    for block, doc, keys in _sections(Config, ""):
        parts.append(f"## {block}\n\n{doc}\n\n| Key | Type | Default | Unit | Meaning |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(block, name, leaves()[name])}" for name in keys) + "\n"
    old = [f"| `{old}` | {', '.join(f'`{key}`' for key in new)} |" for old, new in ALIASES.items()]
    old += [f"| `{old}*` | `{new}*` |" for old, new in BLOCK_ALIASES.items()]
    parts.append("## Other spellings\n\n| Written | Sets |\n|---|---|\n" + "\n".join(old) + "\n")
    return "\n".join(parts)


def _sections(kind: type[Section], prefix: str, doc: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """(block, its meaning, its keys) of every section that has keys of its own, outer ones first."""
    assert is_dataclass(kind)
    hints, own, inner = get_type_hints(kind), [], []
    for item in fields(kind):
        annotation = hints[item.name]
        if isinstance(annotation, type) and issubclass(annotation, Section):
            inner.append((annotation, f"{prefix}{item.name}", item.metadata["doc"]))
        else:
            own.append(f"{prefix}{item.name}")
    if own:
        yield prefix.removesuffix("."), doc, own
    for annotation, name, meaning in inner:
        yield from _sections(annotation, f"{name}.", meaning)


def _row(block: str, name: str, leaf: Leaf) -> str:
    cells = (
        f"`{name.removeprefix(f'{block}.')}`",
        _type(leaf),
        f"`{_default(leaf)}`",
        leaf.unit or "",
        leaf.doc,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(leaf: Leaf) -> str:
    return "open block" if leaf.is_open else _in_words(leaf.kind)


def _in_words(kind: Any) -> str:
    """int | None → "int or null"."""
    if get_origin(kind) is list:
        return f"list of {_in_words(get_args(kind)[0])}"
    if get_args(kind):
        return " or ".join(_in_words(part) for part in get_args(kind))
    return {NoneType: "null", str: "text", bool: "bool", int: "int", float: "float"}.get(kind, "value or list")


def _default(leaf: Leaf) -> str:
    """As it would be written on the command line."""
    default = leaf.default
    if isinstance(default, list):
        return f"[{','.join(str(item) for item in default)}]"
    return "null" if default is None else str(default)


def _spellings(name: str) -> list[str]:
    """Other keys that set this one."""
    single = [old for old, new in ALIASES.items() if name in new]
    moved = [old + name.removeprefix(new) for old, new in BLOCK_ALIASES.items() if name.startswith(new)]
    return single + moved
