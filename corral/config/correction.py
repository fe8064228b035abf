"""algorithm.rollout_correction.*: criteria and bands as a user writes them, made numbers."""

from __future__ import annotations

import math
from typing import Any

from corral.config.names import REJECTIONS, check_name
from corral.config.plan import Rejection, RolloutCorrection
from corral.config.schema.algorithm import RolloutCorrection as Section
from corral.errors import ConfigError

_BLOCK = "algorithm.rollout_correction"


def rollout_correction(section: Section) -> RolloutCorrection | None:
    """What the keys ask for; None when they ask for nothing. Raises ConfigError for a band that is none."""
    lower, upper = band(f"{_BLOCK}.rollout_is_threshold", section.rollout_is_threshold)
    rejections = _rejections(section.rollout_rs, section.rollout_rs_threshold)
    if section.rollout_is is None and not rejections and not section.bypass_mode:
        return None
    return RolloutCorrection(
        rollout_is=section.rollout_is,
        lower=lower,
        upper=upper,
        batch_normalize=section.rollout_is_batch_normalize,
        rejections=rejections,
        bypass_mode=section.bypass_mode,
        loss_type=section.loss_type,
    )


def band(key: str, value: Any) -> tuple[float | None, float]:
    """(None, upper) of a number, (lower, upper) of "lower_upper". Both are finite and above 0."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{key}={value}: must be a number above 0, or a band low_high such as 0.5_2")
    if len(numbers) == 1:
        return None, numbers[0]
    if numbers[0] >= numbers[1]:
        raise ConfigError(f"{key}={value}: the band is empty; write the lower bound first, such as 0.5_2")
    return numbers[0], numbers[1]


def comma_list(value: Any) -> tuple[str, ...]:
    """The items of "a,b", of [a, b] or of one value, as text; none of null or of nothing."""
    if value is None:
        return ()
    items = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return tuple(text for text in (str(item).strip() for item in items) if text)


def _rejections(criteria: Any, thresholds: Any) -> tuple[Rejection, ...]:
    names, limits = comma_list(criteria), comma_list(thresholds)
    key = f"{_BLOCK}.rollout_rs"
    for name in names:
        check_name(key, name, REJECTIONS)
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={criteria} names a criterion twice; name each once")
    if names and len(limits) not in (1, len(names)):
        raise ConfigError(
            f"{key}_threshold={thresholds} holds {len(limits)} values for {len(names)} criteria of {key}={criteria}; "
            "give one for all of them, or one for each"
        )
    if len(limits) == 1:
        limits *= len(names)
    return tuple(_rejection(name, limit) for name, limit in zip(names, limits, strict=False))


def _rejection(criterion: str, limit: str) -> Rejection:
    """k1 is signed, so its band is of the ratio: u alone means 1/u to u. k2 and k3 only have a largest value."""
    key = f"{_BLOCK}.rollout_rs_threshold"
    lower, upper = band(key, limit)
    if not criterion.endswith("k1"):
        if lower is not None:
            raise ConfigError(f"{key}={limit}: {criterion} is never below 0 and takes one number, the largest allowed")
        return Rejection(criterion, None, upper)
    if lower is None:
        if upper <= 1:
            raise ConfigError(
                f"{key}={limit}: one number u for {criterion} accepts ratios from 1/u to u, so it must be above 1"
            )
        lower = 1 / upper
    return Rejection(criterion, lower, upper)
