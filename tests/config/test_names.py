"""The names a configuration may use are exactly those the code behind them knows; config cannot import it to look."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from corral.algorithms.advantages import ALIASES, ESTIMATORS, TRAITS
from corral.algorithms.aggregate import AGGREGATIONS
from corral.algorithms.kl import KL_ALIASES, KL_ESTIMATORS
from corral.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from corral.algorithms.policy_losses_interface import PolicyLossInput, StatisticsInput
from corral.algorithms.resampling import METHODS
from corral.algorithms.rollout_correction import CRITERIA, LEVELS
from corral.config import names
from corral.config.plan import PolicyLossOptions
from corral.engine.optim import SCHEDULES
from corral.platform import PLATFORMS


def test_names_of_the_algorithms():
    assert set(names.ESTIMATORS) | set(names.ESTIMATOR_ALIASES) == set(ESTIMATORS)
    assert len(ESTIMATORS) == 14
    assert names.ESTIMATOR_ALIASES == ALIASES
    assert set(names.LOSSES) == set(POLICY_LOSSES)
    assert len(POLICY_LOSSES) == 12
    assert set(names.REJECTIONS) == set(CRITERIA)
    assert set(names.CORRECTION_LEVELS) == set(LEVELS)
    assert set(names.REWEIGHT_METHODS) == set(METHODS)
    assert set(names.AGGREGATIONS) == set(AGGREGATIONS)
    plain = {*KL_ESTIMATORS, *KL_ALIASES}
    assert set(names.KL_ESTIMATORS) == plain | {f"{name}+" for name in plain}


def test_names_of_schedules_devices_and_types():
    assert set(names.SCHEDULES) == set(SCHEDULES)
    assert set(names.DEVICES) == {"auto", *PLATFORMS}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names.DTYPES.values())


def test_a_name_is_available_or_comes_later_but_not_both():
    for kind in ("STRATEGIES", "ENGINES", "LOGGERS"):
        assert not set(getattr(names, kind)) & set(getattr(names, f"{kind}_LATER"))


@pytest.mark.parametrize("name", names.ESTIMATORS)
def test_what_an_estimator_needs_and_reads(name):
    facts, traits = names.ESTIMATORS[name], TRAITS[name]
    assert (facts.critic, facts.groups, facts.sum_pi_squared) == (
        traits.needs_critic, traits.needs_groups, traits.needs_sum_pi_squared,
    )  # fmt: skip
    read = {
        "gamma": traits.reads_gamma,
        "lam": traits.reads_lam,
        "norm_adv_by_std_in_grpo": traits.reads_norm_by_std,
        "gdpo_reward_keys": traits.needs_components,
        "gdpo_reward_weights": traits.needs_components,
    }
    assert set(read) == set(names.ESTIMATOR_OPTIONS)
    assert set(facts.reads) == {option for option, is_read in read.items() if is_read}


SETTINGS = {
    "clip_ratio_low": ("clip_low", 0.2, 0.6),
    "clip_ratio_high": ("clip_high", 0.2, 0.9),
    "clip_ratio_c": ("clip_c", 3.0, 1.5),
    **{option: (option.rpartition(".")[2], None, None) for option in names.LOSS_OPTIONS[3:]},
}
OTHER = PolicyLossOptions(0.5, 3.0, 0.9, -9.0, 0.5, 0.9, 0.7, 2.0)
FIRST = PolicyLossOptions(1.0, 1.05, 0.2, -0.5, 5.0, 0.2, 0.1, 0.5)


def loss_of(name: str, changed: str | None) -> list[float]:
    """The losses of 400 tokens in 40 samples, one setting changed."""
    draw = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(400, generator=draw, dtype=torch.float64)
    now = old + torch.randn(400, generator=draw, dtype=torch.float64)
    common = {
        "log_probs": now,
        "old_log_probs": old,
        "advantages": torch.randn(400, generator=draw, dtype=torch.float64),
        "mask": torch.ones(400, dtype=torch.bool),
        **{field: low for field, low, _ in SETTINGS.values() if low is not None},
        "options": FIRST,
    }
    if changed is not None:
        field, low, high = SETTINGS[changed]
        options = {item.name: getattr(OTHER if item.name == field else FIRST, item.name) for item in fields(FIRST)}
        common |= {"options": PolicyLossOptions(**options)} if low is None else {field: high}
    loss = policy_loss(name)
    drawn = torch.randint(0, 1 << 40, (400,), generator=draw)
    offsets = torch.arange(0, 401, 10)
    statistics = loss.statistics(StatisticsInput(**common, offsets=offsets, draw=drawn)) if loss.statistics else {}
    return loss.loss(PolicyLossInput(**common, **statistics))[0].tolist()


@pytest.mark.parametrize("name", names.LOSSES)
def test_what_a_loss_reads_and_its_aggregation(name):
    assert names.LOSSES[name].aggregation == POLICY_LOSSES[name].aggregation
    assert set(SETTINGS) == set(names.LOSS_OPTIONS)
    changes = {option for option in SETTINGS if loss_of(name, option) != loss_of(name, None)}
    assert changes == set(names.LOSSES[name].reads)
