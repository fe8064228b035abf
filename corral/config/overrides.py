"""From command-line arguments to checked `key=value` pairs, in Hydra's override grammar.

Every mistake ends here, in one line that shows the argument and how to write it: Hydra's own messages name neither the
quoting nor the nearest key, and it accepts unknown keys given with `+`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from corral.config.aliases import ALIASES, NOT_YET, REPLACED, canonical
from corral.config.schema.root import leaves
from corral.errors import ConfigError

BANDS = tuple(f"algorithm.rollout_correction.{name}_threshold" for name in ("rollout_is", "rollout_rs"))
"""Keys that take low_high beside a number."""
_BRACKETS = r"""[][\s"']"""


@dataclass(frozen=True)
class Override:
    """One argument. `given` is the key as the user spelled it, `keys` the schema keys it sets."""

    given: str
    keys: tuple[str, ...]
    text: str  # the value as typed
    value: Any  # the value as Hydra reads it

    def arguments(self) -> list[str]:
        """The same assignment under the schema's own keys; open blocks take keys that are not there yet."""
        known = leaves()
        return [
            f"{'' if key in known and not known[key].is_open else '++'}{key}={self._text_for(key)}" for key in self.keys
        ]

    def _text_for(self, key: str) -> str:
        """A band keeps its letters: Hydra's grammar reads 0.5_2 as the number 0.52."""
        if key not in BANDS or self.value is None or "${" in self.text:
            return self.text
        return f'"{re.sub(_BRACKETS, "", self.text)}"'


def parse(arguments: Sequence[str]) -> list[Override]:
    """Checked overrides; of one spelling the last wins, two spellings of one key must agree.

    Raises ConfigError for whatever is not `key=value` with a key of the schema.
    """
    parser = OverridesParser.create()
    by_spelling: dict[str, Override] = {}
    for argument in arguments:
        override = _parse_one(parser, argument)
        by_spelling.pop(override.given, None)  # keeps the order of the last occurrence
        by_spelling[override.given] = override
    overrides = list(by_spelling.values())
    _check_spellings(overrides)
    return overrides


def _parse_one(parser: OverridesParser, argument: str) -> Override:
    if argument.startswith("-"):
        raise ConfigError(
            f"{argument!r} is an option, not key=value; `corral --help` lists commands, docs/configuration.md the keys"
        )
    if argument.startswith("~"):
        raise ConfigError(f"{argument!r}: a key cannot be deleted; leave it out, or set it to null with key=null")
    if "=" not in argument:
        raise ConfigError(
            f"{argument!r} is not key=value; if it belongs to the argument before it, quote that one as a whole: "
            "'trainer.logger=[console, file]'"
        )
    key, _, text = argument.partition("=")
    key = key.lstrip("+")
    check_key(key)
    try:
        parsed = parser.parse_override(f"{key}={text}")
    except HydraException as error:
        raise ConfigError(f"cannot read {argument!r} ({str(error).splitlines()[0]}); {_advice(key, text)}") from None
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{argument!r} names several values for one key; a list is written {shlex.quote(f'{key}=[{text}]')}, "
            f"text {quoted(key, text)}"
        )
    return Override(key, canonical(key), text, parsed.value())


def quoted(key: str, text: str) -> str:
    """The argument with its value quoted for Hydra, and the whole quoted for the shell."""
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        bare = bare[1:-1]
    # Inside its quotes Hydra reads a backslash as itself, except in front of a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), bare)
    return shlex.quote(f'{key}="{escaped}"')


def _advice(key: str, text: str) -> str:
    """How to write a value that Hydra's grammar refused."""
    if text.startswith(("[", "{")):
        return f"the shell must hand a list over whole: {shlex.quote(f'{key}=[first, second]')}"
    return f"quote it: {quoted(key, text)}"


def check_key(key: str) -> None:
    """Raise ConfigError unless `key` is a key of the schema, another spelling of one, or inside an open block."""
    if key in REPLACED:
        raise ConfigError(f"{key} is counted over all devices and not supported; set {REPLACED[key]} instead")
    known = leaves()
    if all(name in known or _in_open_block(name) for name in canonical(key)):
        return
    name = canonical(key)[0]
    inside = [leaf for leaf in known if leaf.startswith(f"{name}.")]
    if inside:
        raise ConfigError(f"{key} is a section; set its keys one by one, for example {inside[0]}=...")
    if any(name == block or name.startswith(f"{block}.") for block in NOT_YET):
        raise ConfigError(f"{key} is not available in this version; leave it out")
    raise ConfigError(f"unknown key {key!r}; the nearest known key is {nearest_key(name)!r}")


def nearest_key(key: str) -> str:
    """The known key most like `key`; one that only lacks the sections in front comes first."""
    known = [*leaves(), *ALIASES]
    ends = [name for name in known if name.endswith(f".{key}")]
    return ends[0] if ends else nearest(key, known)


def nearest(word: str, known: Iterable[str]) -> str:
    """The most similar of the known words, however far."""
    return get_close_matches(word, list(known), n=1, cutoff=0.0)[0]


def _in_open_block(key: str) -> bool:
    return any(leaf.is_open and key.startswith(f"{name}.") for name, leaf in leaves().items())


def _check_spellings(overrides: Sequence[Override]) -> None:
    seen: dict[str, Override] = {}
    for override in overrides:
        for key in override.keys:
            other = seen.setdefault(key, override)
            if other.value != override.value:
                raise ConfigError(
                    f"{other.given}={other.text} and {override.given}={override.text} both set {key} and disagree; "
                    "keep one of them"
                )
