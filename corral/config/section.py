"""The base of every schema section, and its documented fields."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


class Section:
    """A schema dataclass: keys and nested sections."""


def key(default: Any, doc: str, unit: str | None = None) -> Any:
    """A documented field. `unit` names what a number counts (prompts, samples, tokens, steps, seconds)."""
    metadata = {"doc": doc, "unit": unit}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type[Section], doc: str = "", **defaults: Any) -> Any:
    """A nested section; `defaults` replace some of its own defaults (the critic's learning rate)."""
    return field(default_factory=lambda: kind(**defaults), metadata={"doc": doc, "unit": None})


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
