"""Rollout correction against the loop-by-loop oracle, and the batches it must survive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.rollout_correction import (
    CRITERIA,
    LEVELS,
    correct,
    importance_weights,
    mismatch,
)
from corral.config.plan import Rejection, RolloutCorrection
from tests.algorithms.ragged import OUTSIDE, flat, flat_mask, masks, numbers, offsets_of, poisoned, rows_like
from tests.oracles import rollout_correction as oracle

NOTHING = RolloutCorrection(None, None, 2.0, False, (), False, "ppo_clip")
# A band never ends exactly where a drawn value can lie: which side rounding puts it on is not decided.
uppers = st.sampled_from([0.1234567, 0.7654321, 1.2345678, 2.3456789, 7.6543211])
k1_uppers = st.sampled_from([1.2345678, 2.3456789, 7.6543211])
lowers = st.sampled_from([None, 0.0876543, 0.5432101])
log_probs = st.one_of(numbers, st.sampled_from([-300.0, 300.0, -24.5, 24.5]))


@dataclass
class Case:
    mask: list[list[bool]]
    old: list[list[float]]
    rollout: list[list[float]]
    outside: float

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        valid = flat_mask(self.mask)
        old, rollout = (poisoned(flat(rows), valid, self.outside) for rows in (self.old, self.rollout))
        return old, rollout, valid, offsets_of(self.mask)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask = draw(masks())
    return Case(
        mask, rows_like(draw, mask, log_probs), rows_like(draw, mask, log_probs), draw(st.sampled_from(OUTSIDE))
    )


@st.composite
def rules(draw: st.DrawFn) -> Rejection:
    name = draw(st.sampled_from(CRITERIA))
    return Rejection(name, draw(lowers), draw(k1_uppers if name.endswith("k1") else uppers))


def close(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, flat(expected).double(), rtol=1e-10, atol=1e-10)


@settings(deadline=None)
@given(cases(), st.lists(rules(), max_size=3), st.sampled_from(LEVELS), lowers, uppers, st.booleans())
def test_weights_and_mask_match_the_oracle(
    case: Case, rejections: list[Rejection], level: str, lower: float | None, upper: float, normalise: bool
) -> None:
    plan = RolloutCorrection(level, lower, upper, normalise, tuple(rejections), False, "ppo_clip")
    done = correct(plan, *case.tensors())
    kept = oracle.kept([(r.criterion, (r.lower, r.upper)) for r in rejections], case.old, case.rollout, case.mask)
    assert done.mask.tolist() == flat_mask(kept).tolist()
    expected = oracle.weights(level, (lower, upper), normalise, case.old, case.rollout, case.mask, kept)
    assert done.weights is not None
    close(done.weights, expected)
    assert all(math.isfinite(value) for value in done.metrics.values())


@settings(deadline=None)
@given(cases(), rules())
def test_each_criterion_matches_the_oracle_and_reports_its_share(case: Case, rule: Rejection) -> None:
    done = correct(replace(NOTHING, rejections=(rule,)), *case.tensors())
    kept = oracle.kept([(rule.criterion, (rule.lower, rule.upper))], case.old, case.rollout, case.mask)
    assert done.weights is None
    assert done.mask.tolist() == flat_mask(kept).tolist()
    valid = sum(map(sum, case.mask))
    rejected = valid - sum(map(sum, kept))
    assert done.metrics[f"rollout_rs_{rule.criterion}_masked_fraction"] == pytest.approx(rejected / max(valid, 1))
    assert done.metrics["rollout_rs_masked_fraction"] == pytest.approx(rejected / max(valid, 1))
    answered = sum(any(row) for row in case.mask)
    gone = sum(any(a) and not any(b) for a, b in zip(case.mask, kept, strict=True))
    assert done.metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(gone / max(answered, 1))


@settings(deadline=None)
@given(cases())
def test_diagnostics_match_the_oracle(case: Case) -> None:
    expected = oracle.mismatch(case.old, case.rollout, case.mask)
    assert mismatch(*case.tensors()) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@settings(deadline=None)
@given(cases(), st.lists(rules(), max_size=2), st.sampled_from([None, *LEVELS]), st.randoms())
def test_the_order_of_samples_does_not_matter(
    case: Case, rejections: list[Rejection], level: str | None, random
) -> None:
    plan = RolloutCorrection(level, None, 2.3456789, True, tuple(rejections), False, "ppo_clip")
    order = list(range(len(case.mask)))
    random.shuffle(order)
    shuffled = Case(*([rows[i] for i in order] for rows in (case.mask, case.old, case.rollout)), case.outside)
    here, there = correct(plan, *case.tensors()), correct(plan, *shuffled.tensors())
    assert rows_of(there.mask, shuffled.mask) == [rows_of(here.mask, case.mask)[i] for i in order]
    if here.weights is not None and there.weights is not None:
        expected = [rows_of(here.weights, case.mask)[i] for i in order]
        close(there.weights, expected)
    assert there.metrics == pytest.approx(here.metrics, rel=1e-10, abs=1e-12)


def rows_of(x: Tensor, mask: list[list[bool]]) -> list[list[float]]:
    return [part.tolist() for part in x.split([len(row) for row in mask])]


def test_by_hand() -> None:
    """Two samples, log-ratios (ln 4, 0) and (−ln 2, −ln 2)."""
    rollout = torch.zeros(4, dtype=torch.float64)
    old = torch.tensor([math.log(4), 0.0, -math.log(2), -math.log(2)], dtype=torch.float64)
    given_mask = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])

    def weights(level: str, lower: float | None, normalise: bool = False) -> list[float]:
        plan = replace(NOTHING, rollout_is=level, lower=lower, batch_normalize=normalise)
        return importance_weights(plan, old, rollout, *given_mask).tolist()

    assert weights("token", None) == pytest.approx([2, 1, 0.5, 0.5])  # truncated at 2
    assert weights("token", 0.75) == pytest.approx([0, 1, 0, 0])  # band
    assert weights("sequence", None) == pytest.approx([2, 2, 0.25, 0.25])
    assert weights("token", None, True) == pytest.approx([2, 1, 0.5, 0.5])  # its mean is 1 already
    assert weights("sequence", None, True) == pytest.approx([2 / 1.125, 2 / 1.125, 0.25 / 1.125, 0.25 / 1.125])

    def left(name: str, upper: float) -> list[bool]:
        plan = replace(NOTHING, rejections=(Rejection(name, None, upper),))
        return correct(plan, old, rollout, *given_mask).mask.tolist()

    assert left("token_k1", 3.0) == [False, True, True, True]
    assert left("seq_sum_k1", 3.9) == [False] * 4  # ratios 4 and 1/4
    assert left("seq_mean_k1", 2.1) == [True] * 4  # geometric means 2 and 1/2
    assert left("seq_max_k2", 0.5) == [False, False, True, True]  # ½ ln² 4 = 0.96, ½ ln² 2 = 0.24


# Batches it must survive ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_fully_rejected_batch_is_defined(name: str, level: str | None, normalise: bool) -> None:
    """Field report: a micro-batch whose samples are all rejected must not raise (verl issue 6485)."""
    old, rollout = torch.full((3,), -9.0), torch.full((3,), -1.0)
    plan = RolloutCorrection(level, None, 2.0, normalise, (Rejection(name, None, 1.5),), False, "ppo_clip")
    done = correct(plan, old, rollout, torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 2, 3]))
    assert not done.mask.any()
    assert (done.weights is None) == (level is None)
    assert done.weights is None or done.weights.tolist() == [0, 0, 0]
    assert done.metrics["rollout_rs_masked_fraction"] == done.metrics["rollout_rs_seq_masked_fraction"] == 1
    assert all(math.isfinite(value) for value in done.metrics.values())


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [0, 1]])
def test_without_a_valid_token(offsets: list[int]) -> None:
    tokens = torch.full((offsets[-1],), math.nan)
    masked = torch.zeros(offsets[-1], dtype=torch.bool), torch.tensor(offsets)
    everything = RolloutCorrection(
        "sequence", None, 2.0, True, tuple(Rejection(name, None, 2.0) for name in CRITERIA), False, "ppo_clip"
    )
    done = correct(everything, tokens, tokens, *masked)
    assert done.weights is not None
    assert done.weights.tolist() == [0.0] * offsets[-1]
    assert all(value == 0 for value in done.metrics.values())
    assert mismatch(tokens, tokens, *masked) == {}


def test_weights_carry_no_gradient_and_keep_the_dtype() -> None:
    old = torch.zeros(2, requires_grad=True)
    plan = replace(NOTHING, rollout_is="token")
    weights = importance_weights(plan, old, torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    assert not weights.requires_grad
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([math.exp(-1)] * 2)


def test_a_band_that_takes_everything_leaves_zeros_also_when_normalised() -> None:
    plan = replace(NOTHING, rollout_is="token", lower=0.9, upper=1.1, batch_normalize=True)
    done = correct(plan, torch.zeros(2), torch.full((2,), 3.0), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    assert done.weights is not None
    assert done.weights.tolist() == [0, 0]
    assert done.metrics["rollout_is_zero_fraction"] == 1
    assert done.metrics["rollout_is_eff_sample_size"] == 0


def test_the_effective_sample_size() -> None:
    plan = replace(NOTHING, rollout_is="token", upper=100.0)
    old = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    done = correct(
        plan, old, torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    )
    assert done.metrics["rollout_is_eff_sample_size"] == pytest.approx(16 / (2 * 10))
    assert (done.metrics["rollout_is_mean"], done.metrics["rollout_is_max"]) == pytest.approx((2, 3))


def test_unknown_names() -> None:
    given_batch = torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="unknown rollout_is 'tokens'"):
        correct(replace(NOTHING, rollout_is="tokens"), *given_batch)
    with pytest.raises(ValueError, match="unknown rejection 'seq_max_k1'"):
        correct(replace(NOTHING, rejections=(Rejection("seq_max_k1", None, 2.0),)), *given_batch)
