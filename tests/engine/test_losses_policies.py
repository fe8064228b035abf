"""Every policy loss through the actor's objective: aggregated, weighted, cut anyhow, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.aggregate import Denominators
from corral.algorithms.policy_losses import POLICY_LOSSES
from corral.batch import Batch
from corral.engine.losses import ActorObjective
from tests.algorithms.policy_cases import (
    NAMES,
    RESPONSE_LENGTH,
    SETTINGS,
    cases,
    central_differences,
    objective_of,
    prepared,
    seeded_case,
)
from tests.algorithms.ragged import MODES
from tests.oracles import policy_losses as oracle
from tests.oracles import ppo

FIELDS = (
    *("old_log_probs", "advantages", "rollout_is_weights"),
    *("sequence_log_ratio", "sequence_advantage", "selected"),
)


def run(
    objective: ActorObjective, batch: Batch, log_probs: Tensor, slices: list[Tensor]
) -> tuple[dict[str, float], Tensor]:
    """Sums of the statistics over slices of token positions, and the gradient [R]."""
    fields: Mapping[str, Tensor] = {
        "mask": batch.response_mask,
        "weight": objective.token_weights(batch),
        **{name: getattr(batch, name) for name in FIELDS if getattr(batch, name) is not None},
    }
    leaf = log_probs.clone().requires_grad_()
    sums: dict[str, float] = {}
    for at in slices:
        loss, statistics = objective({"log_probs": leaf[at]}, {name: x[at] for name, x in fields.items()})
        loss.backward()
        for name, value in statistics.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return sums, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def everything(batch: Batch) -> list[Tensor]:
    return [torch.arange(batch.response_ids.numel())]


def expected(name: str, mode: str, case: oracle.Case, **changes: object) -> dict[str, float]:
    out = oracle.mini_batch(name, mode, RESPONSE_LENGTH, replace(case, **changes), SETTINGS)
    return {**out, "loss": out["pg_loss"]}


def test_every_registered_loss_is_tested():
    assert {name.partition("/")[0] for name in NAMES} == set(POLICY_LOSSES)
    assert {name for name, loss in POLICY_LOSSES.items() if loss.aggregation} == set(oracle.FORCED)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), mode=st.sampled_from(MODES))
def test_losses_and_metrics_match_the_oracle(name: str, data: st.DataObject, mode: str):
    case = data.draw(cases(name))
    batch, log_probs = prepared(name, case)
    got, gradient = run(objective_of(name, batch, loss_agg_mode=mode), batch, log_probs, everything(batch))
    assert got == pytest.approx(expected(name, mode, case), rel=1e-10, abs=1e-10)
    assert gradient.isfinite().all()
    assert (gradient[~batch.response_mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(data=st.data(), mode=st.sampled_from(MODES))
def test_any_cut_of_the_tokens_changes_nothing(name: str, data: st.DataObject, mode: str):
    batch, log_probs = prepared(name, data.draw(cases(name)))
    objective = objective_of(name, batch, loss_agg_mode=mode)
    positions = data.draw(st.permutations(range(log_probs.numel())))
    ends = sorted(data.draw(st.lists(st.integers(0, len(positions)), min_size=1, max_size=4)))
    pairs = zip([0, *ends], [*ends, len(positions)], strict=True)
    cut = [torch.tensor(positions[a:b], dtype=torch.int64) for a, b in pairs]
    (got, got_gradient), (whole, gradient) = (run(objective, batch, log_probs, c) for c in (cut, everything(batch)))
    assert got == pytest.approx(whole, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_central_differences_of_the_whole_formula(name: str, mode: str):
    case = seeded_case(3)
    batch, log_probs = prepared(name, case)
    _, gradient = run(objective_of(name, batch, loss_agg_mode=mode), batch, log_probs, everything(batch))
    by_difference = central_differences(lambda rows: expected(name, mode, case, log_probs=rows)["loss"], case.log_probs)
    torch.testing.assert_close(gradient, by_difference, rtol=1e-6, atol=1e-8)
    assert gradient.abs().max() > 1e-3


def test_with_one_advantage_a_sample_gspo_has_the_gradient_of_its_sequence_form():
    """No stop-gradient on this side: −A · clip(e^mean(d)) per sample, mean over samples."""
    case = seeded_case(5, equal_advantages=True)
    batch, log_probs = prepared("gspo", case)
    _, gradient = run(objective_of("gspo", batch), batch, log_probs, everything(batch))

    def sequence_form(rows: list[list[float]]) -> float:
        total = 0.0
        for i, mask in enumerate(case.masks):
            if any(mask):
                ratio = oracle.ratio(oracle.sequence_mean(rows, case.old, case.masks, i))
                total += case.weights[i][0] * oracle.ppo_max(ratio, case.advantages[i][0], SETTINGS)[0]
        return total / len(case.masks)

    torch.testing.assert_close(gradient, central_differences(sequence_form, case.log_probs), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", oracle.FORCED)
def test_a_loss_with_its_own_aggregation_ignores_the_configured_one(name: str):
    case = seeded_case(6)
    batch, log_probs = prepared(name, case)
    results = [
        run(objective_of(name, batch, loss_agg_mode=mode), batch, log_probs, everything(batch))[0] for mode in MODES
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in NAMES for mode in MODES if mode != "token-sum" or name in oracle.FORCED],
)
def test_denominators_of_a_part_are_told_apart(name: str, mode: str):
    """The comparisons above can fail: a rank that counts for itself gets another loss. A sum has no denominator."""
    batch, log_probs = prepared(name, seeded_case(1))
    whole = objective_of(name, batch, loss_agg_mode=mode)
    local = replace(whole, denominators=Denominators.of(batch.select([0, 1, 2, 3])))
    losses = [run(objective, batch, log_probs, everything(batch))[0]["loss"] for objective in (whole, local)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outside", [float("nan"), float("inf"), float("-inf")])
def test_what_lies_outside_the_mask_never_leaks(name: str, outside: float):
    case = seeded_case(5)
    keep = [[case.masks[i][t] for t in range(len(row))] for i, row in enumerate(case.old)]

    def dirty(rows: list[list[float]]) -> list[list[float]]:
        return [[x if k else outside for x, k in zip(*pair, strict=True)] for pair in zip(rows, keep, strict=True)]

    spoiled = replace(
        case,
        **{field: dirty(getattr(case, field)) for field in ("log_probs", "at", "old", "advantages", "weights")},
    )
    results = []
    for each in (case, spoiled):
        batch, log_probs = prepared(name, each)
        results.append(run(objective_of(name, batch), batch, log_probs, everything(batch)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", NAMES)
def test_padding_samples_change_nothing(name: str):
    case = seeded_case(8)
    batch, log_probs = prepared(name, case)
    padded = batch.padded(3)
    more = torch.cat([log_probs, torch.full((3,), -1.0, dtype=log_probs.dtype)])
    (alone, gradient), (with_padding, wider) = (
        run(objective_of(name, batch), given, x, everything(given)) for given, x in ((batch, log_probs), (padded, more))
    )
    assert with_padding == pytest.approx(alone, rel=1e-13)
    torch.testing.assert_close(wider, torch.cat([gradient, torch.zeros(3, dtype=gradient.dtype)]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masks", [[[]], [[False, False]], [[], [False]]])
def test_nothing_valid_gives_zeros(name: str, masks: list[list[bool]]):
    rows = [[-0.5] * len(row) for row in masks]
    case = oracle.Case(rows, rows, rows, rows, masks, [[0] * len(row) for row in masks], rows)
    batch, log_probs = prepared(name, case)
    got, gradient = run(objective_of(name, batch), batch, log_probs, everything(batch))
    assert all(value == 0 for value in got.values())
    assert (gradient == 0).all()


def test_the_oracles_token_mean_is_what_it_says():
    """One token in total, by hand: ratio 1.1, advantage 2, importance weight 0.5."""
    row = [[-1.0 + 0.0953101798043249]]
    case = oracle.Case(row, row, [[-1.0]], [[2.0]], [[True]], [[1]], [[0.5]])
    assert expected("vanilla", "token-mean", case)["loss"] == pytest.approx(-1.1)
    assert ppo.aggregate("token-mean", [[3.0, 1.0]], [[True, True]], 2, 1, 1.0) == 2.0
