"""Keys that were set but have no effect in this run, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from corral.config.overrides import Override
from corral.config.plan import Plan, Unused
from corral.config.reasons import reason, reasons_by_key
from corral.config.schema.root import heirs_of
from corral.config.validate import Values


def unused(overrides: Sequence[Override], values: Values, plan: Plan) -> tuple[Unused, ...]:
    """The overrides that nothing reads, in the order given."""
    given = frozenset(key for override in overrides for key in override.keys)
    reasons = reasons_by_key(values, plan)
    out = []
    for override in overrides:
        found = [why_unused(key, reasons, given) for key in override.keys]
        if found[0] is not None and all(found):
            out.append(Unused(override.given, override.text, found[0]))
    return tuple(out)


def why_unused(key: str, reasons: Mapping[str, str], given: frozenset[str]) -> str | None:
    """Why a key has no effect, None when it has one. reasons: of `reasons_by_key`; given: keys the user set.

    A key from which another one takes its value has an effect when that one has.
    """
    heirs = [heir for heir in heirs_of(key) if heir not in given]
    if any(why_unused(heir, reasons, given) is None for heir in heirs):
        return None
    return reason(key, reasons)
