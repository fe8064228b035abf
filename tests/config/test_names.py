"""The names a configuration may use are exactly those the code behind them knows; config cannot import it to look."""

from __future__ import annotations

import torch

from corral.algorithms.advantages import ESTIMATORS
from corral.algorithms.aggregate import AGGREGATIONS
from corral.algorithms.kl import KL_ALIASES, KL_ESTIMATORS
from corral.algorithms.policy_losses import POLICY_LOSSES
from corral.config import names
from corral.engine.optim import SCHEDULES
from corral.platform import PLATFORMS


def test_names_of_the_algorithms():
    assert set(names.ESTIMATORS) == set(ESTIMATORS)
    assert set(names.LOSSES) == set(POLICY_LOSSES)
    assert set(names.AGGREGATIONS) == set(AGGREGATIONS)
    plain = {*KL_ESTIMATORS, *KL_ALIASES}
    assert set(names.KL_ESTIMATORS) == plain | {f"{name}+" for name in plain}


def test_names_of_schedules_devices_and_types():
    assert set(names.SCHEDULES) == set(SCHEDULES)
    assert set(names.DEVICES) == {"auto", *PLATFORMS}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names.DTYPES.values())


def test_a_name_is_available_or_comes_later_but_not_both():
    for kind in ("ESTIMATORS", "LOSSES", "STRATEGIES", "ENGINES", "LOGGERS"):
        assert not set(getattr(names, kind)) & set(getattr(names, f"{kind}_LATER"))
