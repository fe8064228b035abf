"""A case file as YAML: its content, and on what line each key stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from corral.errors import ConfigError

Place = tuple[str | int, ...]  # keys and indices from the root
_MOST_BYTES = 1 << 20
_MOST_PLACES = 20_000  # keys and items, each as often as aliases repeat it


@dataclass(frozen=True)
class Document:
    """lines: of each key and item, from 1."""

    file: Path
    content: dict[str, Any]
    lines: dict[Place, int]

    def at(self, place: Sequence[str | int]) -> str:
        """`case FILE, line 7`, of the innermost part of the place that stands in the file."""
        parts = tuple(place)
        while parts and parts not in self.lines:
            parts = parts[:-1]
        line = self.lines.get(parts)
        return f"case {self.file}" if line is None else f"case {self.file}, line {line}"


def read_document(file: Path) -> Document:
    """Raises ConfigError for what is not YAML, not a mapping, or has a key twice."""
    lines: dict[Place, int] = {}
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"case {file} has over {_MOST_BYTES >> 20} MiB; a case is a page of text")
        loader = _Loader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _collect(node, (), lines, file)
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"cannot read case {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"case {file} is not UTF-8: byte {error.start}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: of a date, or of a number without end
        raise ConfigError(f"case {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"case {file}: expected a mapping of keys such as name, found {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"case {file}: key {key!r} is no text; quote it")
    return Document(file, content, lines)


class _Loader(yaml.SafeLoader):
    """1e-9 is a number, as in YAML 1.2 and everywhere else; PyYAML follows 1.1, which wants 1.0e-9."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _collect(node: Any, place: Place, lines: dict[Place, int], file: Path) -> None:
    """Lines of all keys below a node. YAML itself takes the last of two equal keys and says nothing, and aliases of
    aliases make a page of text a tree without end."""
    if len(lines) > _MOST_PLACES:
        raise ConfigError(f"case {file} has over {_MOST_PLACES} keys and items, with what its aliases repeat")
    if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        where = ".".join(map(str, place))
        raise ConfigError(f"case {file}, line {node.start_mark.line + 1}: {where} holds a NUL byte")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            below = (*place, str(key.value))
            if below in lines:
                raise ConfigError(f"case {file}, line {line}: {'.'.join(map(str, below))} is given twice")
            lines[below] = line
            _collect(value, below, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*place, index)] = value.start_mark.line + 1
            _collect(value, (*place, index), lines, file)
