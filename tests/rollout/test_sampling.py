"""Random streams and the drawing of tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.config.plan import Sampling
from corral.rollout.sampling import draw, uniforms
from tests.rollout import oracle
from tests.rollout.models import GREEDY, SAMPLED


def chi_square(counts: list[int], shares: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True))


def test_the_stream_is_fixed_for_all_time() -> None:
    # A changed stream would silently change every run and every recording.
    assert uniforms(42, 1, 7, 0, 3).tolist() == oracle.stream(42, 1, 7, 0, 3)
    assert uniforms(1, 2, 3, 4, 2).tolist() == [0.8385714748421285, 0.26763721739940394]


@given(key=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4), count=st.integers(1, 50), more=st.integers(0, 50))
def test_a_stream_is_in_range_repeatable_and_a_prefix_of_the_longer_one(
    key: tuple[int, int, int, int], count: int, more: int
) -> None:
    short, long = uniforms(*key, count), uniforms(*key, count + more)
    assert short.dtype == torch.float64
    assert torch.equal(short, long[:count])
    assert bool(((long >= 0) & (long < 1)).all())


@pytest.mark.parametrize("axis", range(5), ids=["seed", "step", "row", "sample_index", "position"])
def test_streams_are_uniform_along_every_part_of_the_key(axis: int) -> None:
    if axis == 4:
        numbers = uniforms(1, 1, 1, 1, 20_000)
    else:
        numbers = torch.stack([uniforms(*[i if a == axis else 1 for a in range(4)], 1)[0] for i in range(20_000)])
    counts = torch.histc(numbers.float(), bins=20, min=0, max=1).long().tolist()
    assert chi_square(counts, [1 / 20] * 20) < 51  # 19 degrees of freedom, p = 1e-4
    pairs = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(pairs)) < 4 / math.sqrt(20_000)


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, replace(SAMPLED, temperature=0.6), replace(SAMPLED, top_k=4), replace(SAMPLED, top_p=0.8)],
    ids=["plain", "cold", "top_k", "top_p"],
)
def test_tokens_are_drawn_with_their_probability(sampling: Sampling) -> None:
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.5, 1.1, 0.2])
    draws = 20_000
    tokens, _ = draw(logits.expand(draws, -1), uniforms(3, 0, 0, 0, draws), sampling)
    log_probs = (logits.double() / sampling.temperature).log_softmax(-1).tolist()
    wanted = oracle.candidates(log_probs, sampling)
    total = sum(wanted.values())
    counts = torch.bincount(tokens, minlength=8).tolist()
    assert {token for token, count in enumerate(counts) if count} == set(wanted)
    assert chi_square([counts[t] for t in wanted], [wanted[t] / total for t in wanted]) < 30  # at most 7 degrees


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8).map(lambda x: round(x, 1)), min_size=1, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 2, 3, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
)
def test_one_draw_equals_the_plain_python_draw(
    logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, do_sample=True, n=1)
    tokens, log_probs = draw(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), sampling)
    exact = torch.tensor(logits).double() / temperature
    wanted = exact.log_softmax(-1).tolist()
    kept = oracle.candidates(wanted, sampling)
    # At the edge of a token's stretch either neighbour is right: accept what a change of 1e-12 would give.
    near = {oracle.pick(wanted, min(max(uniform + e, 0.0), 1 - 1e-16), sampling) for e in (-1e-12, 0.0, 1e-12)}
    edge = {*near, *(t for e in (-1e-9, 1e-9) for t in oracle.candidates(wanted, shifted(sampling, e)))}
    assert int(tokens[0]) in near or (int(tokens[0]) not in kept and int(tokens[0]) in edge)
    assert float(log_probs[0]) == pytest.approx(wanted[int(tokens[0])], abs=1e-12)


def shifted(sampling: Sampling, by: float) -> Sampling:
    return replace(sampling, top_p=min(1.0, sampling.top_p + by))


def test_the_largest_uniform_number_never_lands_on_a_token_without_probability() -> None:
    largest = torch.tensor([1 - 2**-53], dtype=torch.float64)
    for size in range(2, 200):
        logits = torch.linspace(-3, 3, size)[None]
        logits[0, -1] = -math.inf
        tokens, log_probs = draw(logits, largest, SAMPLED)
        assert int(tokens[0]) == size - 2
        assert math.isfinite(float(log_probs[0]))


def test_the_smallest_uniform_number_skips_tokens_without_probability() -> None:
    logits = torch.tensor([[-math.inf, -math.inf, 0.0, 1.0]])
    assert int(draw(logits, torch.zeros(1, dtype=torch.float64), SAMPLED)[0][0]) == 2


def test_log_probs_are_of_the_whole_vocabulary_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    uniform = torch.tensor([0.5], dtype=torch.float64)
    token, log_prob = draw(logits, uniform, Sampling(temperature=2.0, top_k=1, top_p=0.5, do_sample=True, n=1))
    total = math.exp(0.5) + math.exp(1.0) + math.exp(1.5)
    assert int(token[0]) == 2
    assert float(log_prob[0]) == pytest.approx(1.5 - math.log(total), abs=1e-12)


@pytest.mark.parametrize(
    ("sampling", "recorded_at"),
    [(GREEDY, 1.0), (replace(GREEDY, temperature=0.7), 0.7), (replace(SAMPLED, temperature=0.0), 1.0)],
)
def test_greedy_takes_the_first_largest_and_records_at_its_temperature(sampling: Sampling, recorded_at: float) -> None:
    tokens, log_probs = draw(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([0.9], dtype=torch.float64), sampling)
    assert int(tokens[0]) == 1
    assert float(log_probs[0]) == pytest.approx(-math.log(2 + math.exp(-2 / recorded_at)), abs=1e-12)


def test_many_rows_are_handled_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(17, 30, generator=torch.Generator().manual_seed(0))
    numbers = uniforms(0, 0, 0, 0, 17)
    whole = draw(logits, numbers, SAMPLED)
    monkeypatch.setattr("corral.rollout.sampling._WORK_ELEMENTS", 60)
    parts = draw(logits, numbers, SAMPLED)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
