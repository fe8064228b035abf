"""`{name}` in the texts of a case: of a need, `{rollouts}`, `{run_dir}`. `${name}` is the shell's and left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

RESERVED = frozenset({"out", "rollouts", "run_dir", "env"})  # no need and no matrix may have these names
_PLACE = re.compile(r"(?<!\$)\{([a-z][a-z0-9_]*)\}")


def names_in(text: str) -> list[str]:
    """In their order, each as often as it stands there."""
    return _PLACE.findall(text)


def fill(text: str, values: Mapping[str, str]) -> str:
    """With the values that are given; what else stands in braces is left alone."""
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), text)
