"""Which fields of the plan a key decides, found by changing the key and deriving the plan again.

No list to keep up to date: a key that decides nothing is seen to decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import NoneType
from typing import Any, get_args, get_origin

from corral.config import names
from corral.config.derive import derive
from corral.config.reads import leaf_fields
from corral.config.schema.root import Config, leaves
from corral.config.validate import CHOICES, Values, check_values
from corral.errors import ConfigError

_NAMES: dict[str, Iterable[Any]] = {
    "algorithm.adv_estimator": names.ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": names.LOSSES,
    "algorithm.rollout_correction.rollout_rs": names.REJECTIONS,
    "trainer.logger": names.LOGGERS,
    "actor_rollout_ref.rollout.dtype": dict.fromkeys(names.DTYPES.values()),
    "actor_rollout_ref.rollout.engine_kwargs": [{engine: {"other": 1}} for engine in names.ENGINES],
    "actor_rollout_ref.actor.checkpoint.save_contents": [[name] for name in names.SAVE_CONTENTS],
}


@dataclass(frozen=True)
class Influence:
    """fields: of the plan that some other value of the key would change. refused: whether every other value tried is
    refused, as it does not fit the other keys or this version."""

    fields: frozenset[str]
    refused: bool


def influence(key: str, config: Config, values: Values, environ: Mapping[str, str]) -> Influence:
    """What the key decides in a configuration that resolves. `config` is as before when this returns."""
    *path, name = key.split(".")
    section = reduce(getattr, path, config)
    present = getattr(section, name)
    before = leaf_fields(derive(config, environ))
    changed: set[str] = set()
    accepted = False
    try:
        for other in alternatives(key, present):
            setattr(section, name, other)
            try:
                check_values({**values, key: other})
                after = leaf_fields(derive(config, environ))
            except ConfigError:
                continue
            accepted = True
            changed |= {field for field in before.keys() | after.keys() if _differs(field, before, after)}
            if changed and key not in CHOICES and key not in _NAMES:
                break  # names can switch different parts of a run on; another number changes what this one did
    finally:
        setattr(section, name, present)
    return Influence(frozenset(changed), refused=not accepted)


def _differs(field: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """A part that is there or not counts too: its place is None in one plan and has fields of its own in the other."""
    return (field in before) != (field in after) or before[field] != after[field]


def alternatives(key: str, present: Any) -> Iterator[Any]:
    """Other values of a key: the other names it takes, or neighbours of the present value of the same type."""
    choices = list(CHOICES[key][0]) if key in CHOICES else list(_NAMES.get(key, ()))
    if choices:
        yield from (choice for choice in choices if choice != present)
        if present is not None and NoneType in get_args(leaves()[key].kind):
            yield None
        return
    for kind in _kinds(leaves()[key].kind):
        yield from (value for value in _others(kind, present) if value != present or type(value) is not type(present))


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if NoneType in get_args(annotation) else (annotation,)


def _others(kind: Any, present: Any) -> list[Any]:
    origin = get_origin(kind) or kind
    if origin is bool:
        return [True, False]
    if origin is int:
        return [1, 2, 1 << 20] if present is None else [present + 1, present * 2, 1, 2, -1]
    if origin is float:
        return [0.5, 2.0] if present is None else [present / 2, present * 2, 0.5, 2.0]
    if origin is list:
        item = get_args(kind)[0]
        return [[1], [0.5, 0.25], []] if item in (int, float) else [["other"], []]
    if origin is dict:
        return [{"other": 1}]
    if origin is NoneType:
        return [None]
    text = ["other", "bfloat16", "float64"]
    return text if origin is str else [*text, "0.5_3", 3.0]  # a key that takes several types
