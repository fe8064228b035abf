"""Every metric of a batch against plain Python, sample by sample; and the console line."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.batch import Batch
from corral.engine.flops import Dense
from corral.trainer.metrics import (
    console_line,
    data_metrics,
    mean_of_tokens,
    mfu_metrics,
    prefixed,
    rollout_metrics,
    timing_metrics,
)
from corral.workers.worker import Speed

FIELDS = ("rollout_log_probs", "old_log_probs", "values", "scores", "rewards", "advantages", "returns")
numbers = st.floats(-4, 4, width=32)


@dataclass
class Sample:
    """One sample in plain lists; `fields` has a list of numbers for each name, one per token."""

    prompt: int
    mask: list[bool]
    finish: str
    score: float
    fields: dict[str, list[float]]

    def valid(self, name: str) -> list[float]:
        return [x for x, keep in zip(self.fields[name], self.mask, strict=True) if keep]


@st.composite
def a_sample(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 5))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    fields = {name: draw(st.lists(numbers, min_size=length, max_size=length)) for name in FIELDS}
    finish = draw(st.sampled_from(["stop", "length"])) if length else "abort"
    return Sample(draw(st.integers(1, 4)), mask, finish, draw(numbers), fields)


def as_batch(samples: list[Sample], *, critic: bool = True) -> Batch:
    batch = Batch.from_samples(
        [[1] * sample.prompt for sample in samples],
        [[2] * len(sample.mask) for sample in samples],
        row=range(len(samples)),
        sample_index=[0] * len(samples),
        group=range(len(samples)),
        finish=[sample.finish for sample in samples],
    )
    flat = {name: torch.tensor([x for sample in samples for x in sample.fields[name]]) for name in FIELDS}
    if not critic:
        del flat["values"]
    mask = torch.tensor([keep for sample in samples for keep in sample.mask], dtype=torch.bool)
    return batch.with_fields(response_mask=mask, **flat)


def spread(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def expected_data_metrics(samples: list[Sample], cap: int) -> dict[str, float]:
    answered = [sample for sample in samples if sample.mask]
    returns = [x for sample in samples for x in sample.valid("returns")]
    values = [x for sample in samples for x in sample.valid("values")]
    out = {
        **spread("critic/score", [sample.score for sample in answered]),
        **spread("critic/rewards", [sum(sample.fields["rewards"]) for sample in answered]),
        **spread("critic/advantages", [x for sample in samples for x in sample.valid("advantages")]),
        **spread("critic/returns", returns),
        **spread("critic/values", values),
        **spread("response_length", [len(sample.mask) for sample in samples]),
        **spread("response_length_non_aborted", [len(sample.mask) for sample in answered]),
        **spread("prompt_length", [sample.prompt for sample in samples]),
        "response_length/clip_ratio": sum(sample.finish == "length" for sample in samples) / len(samples),
        "prompt_length/clip_ratio": sum(sample.prompt >= cap for sample in samples) / len(samples),
        "response/aborted_ratio": 1 - len(answered) / len(samples),
    }
    if answered:
        cut = sum(sample.finish == "length" for sample in answered)
        out["response_length_non_aborted/clip_ratio"] = cut / len(answered)
    if len(returns) > 1:
        residual = statistics.variance([r - v for r, v in zip(returns, values, strict=True)])
        out["critic/vf_explained_var"] = 1 - residual / (statistics.variance(returns) + 1e-5)
    return out


@settings(max_examples=60, deadline=None)
@given(st.lists(a_sample(), min_size=1, max_size=5), st.integers(1, 4))
def test_data_metrics(samples: list[Sample], cap: int):
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    found = data_metrics(as_batch(samples), scores, cap)
    assert found == pytest.approx(expected_data_metrics(samples, cap), rel=1e-6, abs=1e-6)


def test_without_a_critic_there_are_no_values():
    sample = Sample(1, [True], "stop", 0.5, {name: [1.0] for name in FIELDS})
    names = data_metrics(as_batch([sample], critic=False), torch.tensor([0.5]), 9)
    assert not [name for name in names if "values" in name or "explained" in name]


@settings(max_examples=60, deadline=None)
@given(st.lists(a_sample(), min_size=1, max_size=5))
def test_rollout_metrics(samples: list[Sample]):
    batch = as_batch(samples)
    assert batch.old_log_probs is not None
    found = rollout_metrics(batch, batch.old_log_probs)
    rollout = [math.exp(x) for sample in samples for x in sample.valid("rollout_log_probs")]
    old = [math.exp(x) for sample in samples for x in sample.valid("old_log_probs")]
    gaps = [abs(a - b) for a, b in zip(rollout, old, strict=True)]
    wanted = {"training/rollout_probs_diff_valid": float(bool(gaps))}
    if gaps:
        wanted["training/rollout_probs_diff_max"] = max(gaps)
        wanted["training/rollout_probs_diff_mean"] = statistics.fmean(gaps)
    if len(gaps) > 1:
        wanted["training/rollout_probs_diff_std"] = statistics.stdev(gaps)
    correlation = found.pop("training/rollout_actor_probs_pearson_corr", None)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    if len(gaps) > 1 and statistics.pstdev(rollout) > 1e-3 and statistics.pstdev(old) > 1e-3:
        assert correlation == pytest.approx(statistics.correlation(rollout, old), rel=1e-4, abs=1e-4)


def test_probabilities_that_do_not_vary_have_no_correlation():
    samples = [Sample(1, [True, True], "stop", 0.0, {name: [1.0, 1.0] for name in FIELDS})]
    batch = as_batch(samples)
    assert batch.old_log_probs is not None
    assert "training/rollout_actor_probs_pearson_corr" not in rollout_metrics(batch, batch.old_log_probs)


@given(st.lists(a_sample(), min_size=1, max_size=5), st.integers(1, 16), st.integers(0, 900))
def test_timing_metrics(samples: list[Sample], world: int, generated: int):
    seconds = {"gen": 2.0, "reward": 0.5, "values": 0.25, "update_actor": 3.0, "step": 8.0}
    found = timing_metrics(as_batch(samples), seconds, world, generated)
    tokens = sum(sample.prompt + len(sample.mask) for sample in samples)
    wanted = {f"timing_s/{name}": value for name, value in seconds.items()}
    wanted["timing_per_token_ms/values"] = 250 / tokens
    wanted["timing_per_token_ms/update_actor"] = 3000 / tokens
    if generated:
        wanted["timing_per_token_ms/gen"] = 2000 / generated
    wanted.update({"perf/total_num_tokens": tokens, "perf/time_per_step": 8.0, "perf/throughput": tokens / 8 / world})
    assert found == pytest.approx(wanted)


def test_use_of_the_devices():
    batch = as_batch([Sample(1, [True] * 3, "stop", 0.0, {name: [0.0] * 3 for name in FIELDS})] * 2)
    costs = {"actor": Dense(weights=1000, attention=10), "critic": Dense(weights=500, attention=10)}
    seconds = {"update_actor": 2.0, "step": 8.0}
    found = mfu_metrics(Speed(costs, peak=1e5), batch, {"actor": 3, "critic": 1}, seconds, world=4)
    assert found == {"perf/mfu/actor": pytest.approx(3 * 6 * (1000 * 8 + 10 * 32) / (2.0 * 4 * 1e5))}
    assert mfu_metrics(Speed(costs, peak=None), batch, {"actor": 3, "critic": 1}, seconds, world=4) == {}


def test_the_mean_of_tokens_is_over_the_policys_own():
    samples = [Sample(1, [True, False, True], "stop", 0.0, {name: [1.0, 100.0, 4.0] for name in FIELDS})]
    batch = as_batch(samples)
    assert batch.values is not None
    assert mean_of_tokens(batch, batch.values) == 2.5
    nothing = as_batch([Sample(1, [False], "stop", 0.0, {name: [7.0] for name in FIELDS})])
    assert nothing.values is not None
    assert mean_of_tokens(nothing, nothing.values) == 0.0


def test_the_console_line():
    metrics = {"training/global_step": 12.0, "actor/lr": 1e-06, "actor/pg_loss": -0.123456789, "perf/tokens": 1e16}
    assert console_line(12, metrics) == (
        "step:12 - training/global_step:12 - actor/lr:1e-06 - actor/pg_loss:-0.123457 - perf/tokens:1e+16"
    )
    assert console_line(0, {}) == "step:0"


@given(st.dictionaries(st.from_regex(r"[a-z_/@0-9]+", fullmatch=True), st.floats(), min_size=1, max_size=5))
def test_a_console_line_is_read_back(metrics: dict[str, float]):
    first, *rest = console_line(3, metrics).split(" - ")
    assert first == "step:3"
    read = {name: float(value) for name, _, value in (item.rpartition(":") for item in rest)}
    assert read == pytest.approx(metrics, rel=1e-5, nan_ok=True)


def test_prefixed():
    assert prefixed("actor", {"lr": 1.0}) == {"actor/lr": 1.0}
