"""What became of every key of a run: keys.json in its folder.

Each key is in one class. used: something read what it decides. not needed: left at its default, and nothing here needs
it. not applicable: set, but without effect here, which the plan has said. rejected: every value but the present one is
refused by this version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.config.influence import Influence, influence
from corral.config.reads import Reads
from corral.config.reasons import reasons_by_key
from corral.config.resolve import Resolved, flatten
from corral.config.schema.root import heirs_of, leaves
from corral.config.unused import why_unused

USED, NOT_NEEDED, NOT_APPLICABLE, REJECTED = "used", "not needed", "not applicable", "rejected"

_PACKED = "rows are always packed"
_ALL_RANKS = "a model is sharded over all ranks"
_FSDP2 = "fsdp and fsdp2 both mean FSDP2"
ONE_VALUE = {
    "actor_rollout_ref.model.use_remove_padding": _PACKED,
    "critic.model.use_remove_padding": _PACKED,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": _ALL_RANKS,
    "actor_rollout_ref.ref.fsdp_config.fsdp_size": _ALL_RANKS,
    "critic.fsdp.fsdp_size": _ALL_RANKS,
    "actor_rollout_ref.actor.strategy": _FSDP2,
    "critic.strategy": _FSDP2,
    "reward.reward_manager.name": "the score is on the last token",
}
"""Keys with one meaning in this version → what it is."""
NATIVE_ONE_VALUE = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "the native engine holds a whole model",
}
"""More of them where the native engine generates."""

_PLANNING = "corral.config"
_DECIDED_WHILE_PLANNING = ("actor_rollout_ref.rollout.name",)
"""Which engine runs is settled before anything could read it."""


@dataclass(frozen=True)
class KeyUse:
    """One key of a run. `by`: the modules that read it; `fields`: of the plan, what they read. Both are empty unless it
    is used; `reason` is empty when it is."""

    kind: str  # used | not needed | not applicable | rejected
    value: Any
    by: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for keys.json."""
        if self.kind == USED:
            return {"class": self.kind, "value": self.value, "by": list(self.by), "plan": list(self.fields)}
        return {"class": self.kind, "value": self.value, "reason": self.reason}


def audit(resolved: Resolved, reads: Reads) -> dict[str, KeyUse]:
    """Every key of the schema → what became of it, given the fields of the plan that the run read."""
    values = flatten(resolved.config)
    reasons = reasons_by_key(values, resolved.plan)
    one_value = ONE_VALUE | (NATIVE_ONE_VALUE if resolved.plan.rollout.name == "native" else {})
    found = {key: influence(key, resolved.typed, values, resolved.environ) for key in leaves()}
    out = {}
    for key in leaves():
        set_here = key in resolved.given
        reason = why_unused(key, reasons, resolved.given)
        decides = _with_heirs(key, found, resolved.given)
        read = {field: reads[field] for field in decides if field in reads}
        if key in one_value:
            out[key] = KeyUse(REJECTED, values[key], reason=f"{one_value[key]}; another value is refused")
        elif reason is not None:
            out[key] = KeyUse(NOT_APPLICABLE if set_here else NOT_NEEDED, values[key], reason=reason)
        elif read:
            readers = tuple(sorted(set().union(*read.values())))
            out[key] = KeyUse(USED, values[key], by=readers, fields=tuple(sorted(read)))
        elif found[key].refused or key in _DECIDED_WHILE_PLANNING:
            out[key] = KeyUse(USED, values[key], by=(_PLANNING,))  # no other value fits the other keys
        else:
            unread = f"{UNREAD} {', '.join(sorted(decides)) or 'anything it decides'}"
            out[key] = KeyUse(NOT_APPLICABLE if set_here else NOT_NEEDED, values[key], reason=unread)
    return out


UNREAD = "this run did not read"
"""Start of the reason of a key that should have had an effect, as far as the plan knows: a run that ended early."""


def _with_heirs(key: str, found: Mapping[str, Influence], given: frozenset[str]) -> frozenset[str]:
    """Fields that a key decides itself, or through the keys that take their value from it."""
    heirs = [heir for heir in heirs_of(key) if heir not in given]
    return found[key].fields.union(*(_with_heirs(heir, found, given) for heir in heirs))
