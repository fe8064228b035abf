"""The base of every schema section: documented fields whose reads are recorded.

A key is "used" when something read it, not when a list says so. Every schema dataclass therefore records which of its
fields were read since it was built; `read_keys` collects them.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

_READS = "_reads"


class Section:
    """A schema dataclass that remembers which of its fields were read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault(_READS, set()).add(name)
        return object.__getattribute__(self, name)


def key(default: Any, doc: str, unit: str | None = None) -> Any:
    """A documented field. `unit` names what a number counts (prompts, samples, tokens, steps, seconds)."""
    metadata = {"doc": doc, "unit": unit}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type[Section], doc: str = "", **defaults: Any) -> Any:
    """A nested section; `defaults` replace some of its own defaults (the critic's learning rate)."""
    return field(default_factory=lambda: kind(**defaults), metadata={"doc": doc, "unit": None})


def read_keys(node: Section, prefix: str = "") -> set[str]:
    """Full dotted names of the leaves that were read since `node` was built."""
    held = object.__getattribute__(node, "__dict__")
    out: set[str] = set()
    for item in fields(node):  # type: ignore[arg-type]  # every Section subclass is a dataclass
        value = held[item.name]
        if isinstance(value, Section):
            out |= read_keys(value, f"{prefix}{item.name}.")
        elif item.name in held.get(_READS, ()):
            out.add(f"{prefix}{item.name}")
    return out


@dataclass(frozen=True)
class Leaf:
    """One key of the schema."""

    kind: Any  # the annotation: int, float | None, list[int], dict[str, Any], Any
    default: Any
    doc: str
    unit: str | None

    @property
    def is_open(self) -> bool:
        """True for a block that takes any key (engine_kwargs, override_config, reward_kwargs)."""
        return getattr(self.kind, "__origin__", None) is dict
