"""Policy losses per token, and what they pick from a whole mini-batch. Their sums, gradients and oracles, through the
objective that uses them, are in tests/engine/test_losses_policies.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from corral.algorithms.policy_losses_interface import PolicyLoss, PolicyLossInput
from corral.algorithms.policy_losses_selection import token_draws
from corral.batch import Batch
from corral.config.plan import PolicyLossOptions, RolloutCorrection
from corral.errors import ConfigError
from tests.algorithms.policy_cases import (
    NAMES,
    OPTIONS,
    SELECTING,
    SETTINGS,
    batch_of,
    cases,
    correction_of,
    loss_of,
    one_token,
    seeded_case,
    statistics_input,
)
from tests.algorithms.ragged import OUTSIDE, flat, poisoned
from tests.oracles import policy_losses as oracle


def loss_input(name: str, case: oracle.Case) -> PolicyLossInput:
    """All tokens of a mini-batch with the statistics of the loss."""
    batch, log_probs, loss = batch_of(case), flat(case.log_probs), loss_of(name)
    tokens = PolicyLossInput(
        log_probs=log_probs,
        old_log_probs=flat(case.old),
        advantages=flat(case.advantages),
        mask=batch.response_mask,
        clip_low=SETTINGS.low,
        clip_high=SETTINGS.high,
        clip_c=SETTINGS.c,
        options=OPTIONS,
    )
    found = {} if loss.statistics is None else loss.statistics(statistics_input(batch, flat(case.at)))
    return replace(tokens, **found)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), outside=st.sampled_from(OUTSIDE))
def test_tokens_match_the_oracle_whatever_lies_outside_the_mask(name: str, data: st.DataObject, outside: float):
    case = data.draw(cases(name))
    clean = loss_input(name, case)
    valid = clean.mask
    fields = ("log_probs", "old_log_probs", "advantages", "sequence_log_ratio", "sequence_advantage", "selected")
    dirty = replace(
        clean,
        **{f: poisoned(getattr(clean, f), valid, outside) for f in fields if getattr(clean, f) is not None},
    )
    dirty.log_probs.requires_grad_()
    loss, happened = loss_of(name).loss(dirty)
    expected, seen = oracle.tokens(name, case, SETTINGS)
    torch.testing.assert_close(loss, flat(oracle.as_rows(expected, case.masks)).double(), rtol=1e-10, atol=1e-10)
    assert happened.keys() == seen.keys()
    for metric, values in seen.items():
        got = happened[metric].double()
        assert not got.requires_grad
        torch.testing.assert_close(
            got[valid], flat(oracle.as_rows(values, case.masks)).double()[valid], rtol=1e-10, atol=1e-10
        )
    if loss.numel():
        (gradient,) = torch.autograd.grad(loss.sum(), dirty.log_probs)
        assert gradient.isfinite().all()
        assert (gradient[~valid] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_nothing_is_clipped_and_the_gradient_is_the_policy_gradient(name: str):
    """At ratio 1 every loss has the gradient −A per unit of log-prob (a selected token of clip_cov none)."""
    case = seeded_case(2, equal_advantages=True)
    case = replace(case, log_probs=case.old, at=case.old)
    tokens = loss_input(name, case)
    tokens.log_probs.requires_grad_()
    loss, happened = loss_of(name).loss(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
    counted = tokens.mask if name != "clip_cov" else tokens.mask & (tokens.selected == 0)
    torch.testing.assert_close(gradient, torch.where(counted, -tokens.advantages, 0), rtol=1e-12, atol=1e-12)
    for metric, values in happened.items():
        assert metric == "pg_selected" or (values[tokens.mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 88.0])
def test_huge_log_ratios_stay_finite(name: str, dtype: torch.dtype, log_ratio: float):
    for advantage in (1.0, -1.0):
        tokens = loss_input(name, one_token(min(log_ratio, 0.0), min(-log_ratio, 0.0), advantage))
        narrow = {
            field: getattr(tokens, field).to(dtype)
            for field in ("log_probs", "old_log_probs", "advantages", "sequence_log_ratio", "sequence_advantage")
            if getattr(tokens, field) is not None
        }
        tokens = replace(tokens, **narrow)
        tokens.log_probs.requires_grad_()
        loss, _ = loss_of(name).loss(tokens)
        (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
        assert math.isfinite(loss.item())
        assert math.isfinite(gradient.item())
        assert loss.dtype == dtype


def test_dppo_tells_apart_what_moves_away_from_what_moves_back():
    """A probable token that became improbable: with A > 0 the step leads back and counts, with A < 0 it does not."""
    for name in ("dppo_tv", "dppo_kl"):
        for advantage, counts in ((1.0, True), (-1.0, False)):
            loss, happened = loss_of(name).loss(loss_input(name, one_token(-2.0, -0.05, advantage)))
            assert (loss.item() != 0) == counts
            assert bool(happened["pg_clipfrac"]) != counts


def test_dro_without_beta_is_an_error():
    tokens = replace(loss_input("dro", seeded_case(1)), options=PolicyLossOptions())
    with pytest.raises(ValueError, match="dro_beta"):
        loss_of("dro").loss(tokens)


# Selection ---------------------------------------------------------------------------------------------------------


def selected_tokens(name: str, batch: Batch, log_probs: torch.Tensor, **changes: object) -> set[tuple[int, int]]:
    """(data row, position) of the tokens a loss picks."""
    statistics = loss_of(name).statistics
    assert statistics is not None
    picked = statistics(statistics_input(batch, log_probs, **changes))["selected"].nonzero()[:, 0]
    samples = batch.sample_of_token[picked]
    positions = picked - batch.response_offsets[samples]
    return set(zip(batch.row[samples].tolist(), positions.tolist(), strict=True))


@pytest.mark.parametrize("name", SELECTING)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_order_of_samples_does_not_change_what_is_picked(name: str, data: st.DataObject):
    case = data.draw(cases(name))
    batch = batch_of(case).with_fields(values=flat(case.log_probs))
    shuffled = batch.select(data.draw(st.permutations(range(len(batch)))))
    assert selected_tokens(name, batch, batch.values) == selected_tokens(name, shuffled, shuffled.values)


@pytest.mark.parametrize("name", SELECTING)
def test_equal_covariances_are_picked_by_their_random_numbers_also_when_rounding_differs(name: str):
    """All advantages are equal, so every covariance is 0 up to rounding: the same tokens, whatever the rounding."""
    case = replace(seeded_case(1), advantages=[[0.1] * len(row) for row in seeded_case(1).old])
    batch, log_probs = batch_of(case), flat(case.log_probs)
    options = replace(OPTIONS, clip_cov_lb=-1.0, clip_cov_ub=1.0)
    noise = 1e-15 * torch.randn(log_probs.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = selected_tokens(name, batch, log_probs, options=options)
    assert len(first) > 3
    assert first == selected_tokens(name, batch, log_probs + noise, options=options)
    assert first == selected_tokens(name, batch, log_probs, options=options, advantages=batch.advantages + noise)
    other = token_draws(batch, 7, 3, 2)
    assert first != selected_tokens(name, batch, log_probs, options=options, draw=other)


@pytest.mark.parametrize("name", SELECTING)
def test_parts_would_pick_other_tokens_than_the_whole(name: str):
    """Why statistics are of the whole mini-batch: two halves that count for themselves choose otherwise."""
    case = seeded_case(4)
    batch = batch_of(case).with_fields(values=flat(case.log_probs))
    halves = [batch.select(range(4)), batch.select(range(4, 8))]
    apart = set().union(*(selected_tokens(name, half, half.values) for half in halves))
    assert apart != selected_tokens(name, batch, batch.values)


@pytest.mark.parametrize("name", SELECTING)
def test_a_share_of_less_than_one_token_still_picks_one(name: str):
    case = seeded_case(4)
    options = replace(OPTIONS, clip_cov_ratio=1e-9, kl_cov_ratio=1e-9)
    assert len(selected_tokens(name, batch_of(case), flat(case.log_probs), options=options)) == 1


def test_clip_cov_picks_nothing_when_no_covariance_is_inside_the_band():
    case = seeded_case(4)
    options = replace(OPTIONS, clip_cov_lb=1e6, clip_cov_ub=2e6)
    assert selected_tokens("clip_cov", batch_of(case), flat(case.log_probs), options=options) == set()


def test_draws_are_of_the_token_and_the_key_and_look_random():
    batch = Batch.from_samples(
        [[1]] * 200, [[2] * 50] * 200, row=[i // 2 for i in range(200)], sample_index=[i % 2 for i in range(200)],
        group=list(range(200)), finish=["stop"] * 200,
    )  # fmt: skip
    draws = token_draws(batch, 1, 2, 3)
    assert draws.unique().numel() == 10_000
    assert (draws >= 0).all()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    moved = batch.with_fields(values=draws.double()).select(order).values
    assert torch.equal(token_draws(batch.select(order), 1, 2, 3).double(), moved)
    assert not (draws == token_draws(batch, 1, 3, 2)).any()
    uniform = draws.double() / 2**63
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    for bit in range(0, 63, 7):
        assert ((draws >> bit) & 1).double().mean().item() == pytest.approx(0.5, abs=0.03)
    by_sample = uniform.view(200, 50)
    assert torch.corrcoef(torch.stack([by_sample[:, 0], by_sample[:, 1]]))[0, 1].abs() < 0.25


# Names and hooks ---------------------------------------------------------------------------------------------------


def test_bypass_mode_is_what_rollout_correction_says():
    settings_of = correction_of("bypass_mode/reinforce", "sequence")
    assert policy_loss("bypass_mode", correction_of("bypass_mode/ppo_clip", "token")) == POLICY_LOSSES["vanilla"]
    assert policy_loss("bypass_mode", correction_of("bypass_mode/reinforce")).statistics is None
    assert policy_loss("vanilla", settings_of) == POLICY_LOSSES["vanilla"]
    statistics = policy_loss("bypass_mode", settings_of).statistics
    assert statistics is not None
    case = seeded_case(3)
    found = statistics(statistics_input(batch_of(case), flat(case.at), correction=settings_of))
    assert set(found) == {"rollout_is_weights"}
    for i, mask in enumerate(case.masks):
        valid = [t for t, keep in enumerate(mask) if keep]
        total = sum(case.at[i][t] - case.old[i][t] for t in valid)
        start = sum(map(len, case.masks[:i]))
        for t in valid:
            assert found["rollout_is_weights"][start + t].item() == pytest.approx(min(oracle.ratio(total), 2.0))


USERS = """
from corral.algorithms.policy_losses_interface import PolicyLoss


def squared(tokens):
    d = (tokens.log_probs - tokens.old_log_probs).where(tokens.mask, 0)
    return d.square(), {"my_share": d > 0}


def means(batch):
    return {"sequence_log_ratio": batch.log_probs * 0 + 5}


declared = PolicyLoss(squared, statistics=means, aggregation="seq-mean-token-sum")
"""


def test_a_users_loss_is_found_by_import_path(tmp_path: Path):
    """The contract of the hook: a function of PolicyLossInput, or a PolicyLoss that declares what it needs."""
    file = tmp_path / "mine.py"
    file.write_text(USERS)
    plain, declared = policy_loss(f"{file}:squared"), policy_loss(f"{file}:declared")
    assert (plain.statistics, plain.aggregation) == (None, None)
    assert isinstance(declared, PolicyLoss)
    assert declared.aggregation == "seq-mean-token-sum"
    loss, happened = plain.loss(loss_input("vanilla", seeded_case(1)))
    assert set(happened) == {"my_share"}
    assert loss.shape == happened["my_share"].shape
    with pytest.raises(ConfigError, match="loss_mode"):
        policy_loss("vanila")


def test_settings_of_the_plan_serve_as_those_of_the_correction():
    given_settings = RolloutCorrection("token", None, 2.0, False, (), True, "reinforce")
    assert policy_loss("bypass_mode", given_settings).statistics is not None
