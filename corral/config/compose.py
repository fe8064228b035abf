"""Overrides on top of the schema's defaults, through Hydra's compose API: no YAML files, no side effects."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from corral.config.overrides import Override, quoted
from corral.config.schema.root import Config, leaves
from corral.config.section import Section
from corral.errors import ConfigError

T = TypeVar("T", bound=Section)
ConfigStore.instance().store(name="corral", node=Config)


def compose(overrides: Sequence[Override]) -> tuple[Config, dict[str, Any]]:
    """The typed configuration and the same as plain data, interpolations resolved.

    Raises ConfigError for a value of the wrong type or an interpolation that leads nowhere.
    """
    by_argument = {argument: override for override in overrides for argument in override.arguments()}
    try:
        with hydra.initialize(version_base="1.3", config_path=None):
            composed = hydra.compose("corral", overrides=list(by_argument))
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except HydraException as error:
        named = [argument for argument in by_argument if argument in str(error)]
        raise ConfigError(_wrong_type(by_argument[max(named, key=len)]) if named else _one_line(error)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    return _typed(Config, plain), plain


def _typed(kind: type[T], plain: dict[str, Any]) -> T:
    """Sections from plain data that the schema has already checked."""
    hints = get_type_hints(kind)
    return kind(
        **{name: _typed(hints[name], value) if _is_section(hints[name]) else value for name, value in plain.items()}
    )


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _wrong_type(override: Override) -> str:
    kind = leaves()[override.keys[0]].kind if override.keys[0] in leaves() else Any
    line = f"{override.given}={override.text}: expected {_in_words(kind)}"
    if _is_list(kind) and not isinstance(override.value, list):
        return f"{line}; write {shlex.quote(f'{override.given}=[{override.text}]')}"
    if kind is str:
        return f"{line}; write {quoted(override.given, override.text)}"
    return line


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list or any(get_origin(part) is list for part in get_args(kind))


def _in_words(kind: Any) -> str:
    """int | None → "a whole number or null"."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "null"}
    if get_origin(kind) is list:
        return f"a list of {'whole numbers' if get_args(kind) == (int,) else 'values'}"
    if get_origin(kind) is dict:
        return "a mapping, {name: value}"
    if get_args(kind):
        return " or ".join(_in_words(part) for part in get_args(kind))
    return words.get(kind, "another kind of value")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
