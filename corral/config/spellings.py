"""What other spellings were read as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from corral.config import names
from corral.config.overrides import Override
from corral.config.validate import Values

_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_METRIC = "algorithm.filter_groups.metric"


def spellings(overrides: Sequence[Override], values: Values) -> Iterator[str]:
    """One notice for each key or name that was given under another spelling of it."""
    for override in overrides:
        if override.keys[0] != override.given and not override.keys[0].startswith(f"{override.given}."):
            yield f"{override.given} is read as {' and '.join(override.keys)}"
    for key, meant in (
        ("algorithm.adv_estimator", names.estimator(values["algorithm.adv_estimator"])),
        (_LOSS, names.loss(values[_LOSS])),
        (_METRIC, names.METRIC_ALIASES.get(values[_METRIC], values[_METRIC])),
    ):
        if values[key] != meant:
            yield f"{key}={values[key]} is read as {meant}"
