"""Generation by the real vllm, on the CPU, against a full forward of the model in float64 for every token."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.config.plan import RolloutPlan, Sampling
from corral.rollout.base import Completion, Request
from corral.rollout.vllm import VllmEngine
from tests.rollout import oracle
from tests.rollout.models import GREEDY, SAMPLED, VOCABULARY
from tests.rollout.vllm_engines import STOPS, Truth, close_all, needs_vllm, requests, start, vllm_plan, write

pytestmark = needs_vllm

LENGTH = 12
LONGEST = 32
TOLERANCE = 1e-5
WARM = replace(SAMPLED, temperature=0.7)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return write(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def engine(truth: Truth) -> Iterator[VllmEngine]:
    yield start(truth)
    close_all()


@pytest.fixture(scope="module")
def warm(truth: Truth, engine: VllmEngine) -> VllmEngine:
    return start(truth, vllm_plan(sampling=WARM))


def assert_right(
    truth: Truth,
    asked: Sequence[Request],
    found: Sequence[Completion],
    temperature: float = 1.0,
    tolerance: float = TOLERANCE,
) -> None:
    for request, done in zip(asked, found, strict=True):
        wanted = oracle.score(truth.plain, list(request.prompt_ids), list(done.token_ids), temperature)
        assert done.log_probs == pytest.approx(wanted, abs=tolerance, rel=0)


@pytest.mark.parametrize("sampling", [SAMPLED, WARM], ids=["as it is", "colder"])
def test_log_probs_are_those_of_the_scaled_distribution(
    truth: Truth, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue("engine" if sampling is SAMPLED else "warm")
    asked = requests([1, 9, 4, 17, LONGEST], n=3)
    found = engine.generate(asked, sampling, step=1)
    assert_right(truth, asked, found, sampling.temperature)
    for done in found:
        assert all(0 <= token < VOCABULARY for token in done.token_ids)
        ends = [token in STOPS for token in done.token_ids]
        assert not any(ends[:-1])
        assert done.finish == ("stop" if ends[-1] else "length")
        assert done.finish == "stop" or len(done.token_ids) == LENGTH
    assert {done.finish for done in found} == {"stop", "length"}
    assert {done.token_ids[-1] for done in found if done.finish == "stop"} == set(STOPS)


def test_ignore_eos_runs_to_the_cap_whatever_is_sampled(truth: Truth) -> None:
    (free,) = once(truth, vllm_plan(ignore_eos=True), tuple(range(VOCABULARY)))
    assert (len(free.token_ids), free.finish) == (LENGTH, "length")


def test_no_end_token_is_taken_from_the_files_of_the_model(truth: Truth) -> None:
    (done,) = once(truth, vllm_plan(), ())
    assert (len(done.token_ids), done.finish) == (LENGTH, "length")


def once(truth: Truth, plan: RolloutPlan, stops: tuple[int, ...]) -> list[Completion]:
    return start(truth, plan, stops).generate([Request((1, 2, 3), 0, 0)], SAMPLED, step=1)


def test_a_sample_does_not_depend_on_its_company(engine: VllmEngine) -> None:
    asked = requests([1, 9, 4, 17, 2, LONGEST, 9], n=3)
    alone = {request: engine.generate([request], SAMPLED, step=2)[0] for request in asked}
    rng = random.Random(0)
    for count in (len(asked), 2, 7, 13, len(asked)):
        some = rng.sample(asked, count)
        for request, done in zip(some, engine.generate(some, SAMPLED, step=2), strict=True):
            assert done.token_ids == alone[request].token_ids
            assert done.finish == alone[request].finish
            assert done.log_probs == pytest.approx(alone[request].log_probs, abs=TOLERANCE, rel=0)


NARROW = {
    "few sequences": {"max_num_seqs": 2},
    "few tokens": {"max_num_seqs": 8, "vllm": {"max_num_batched_tokens": LONGEST + LENGTH + 1}},
    "little memory": {"vllm": {"cache_bytes": 4 << 17}},
}


@pytest.mark.parametrize("narrow", NARROW.values(), ids=NARROW.keys())
def test_more_requests_than_are_computed_together(truth: Truth, engine: VllmEngine, narrow: dict[str, Any]) -> None:
    asked = requests([5, LONGEST, 9, 4, 30], n=4)
    few = start(truth, vllm_plan(**narrow)).generate(asked, SAMPLED, step=1)
    many = engine.generate(asked, SAMPLED, step=1)
    assert [done.token_ids for done in few] == [done.token_ids for done in many]


def test_a_sample_that_had_to_make_room_goes_on_as_it_would_have(truth: Truth) -> None:
    """Keys and values of 128 tokens are a block; there are three, and each of two samples comes to need two."""
    roomy = vllm_plan(prompt_length=128, ignore_eos=True)
    assert roomy.vllm is not None
    asked = requests([120, 122])
    small = replace(roomy, vllm=replace(roomy.vllm, cache_bytes=4 << 17))
    few, many = (start(truth, plan).generate(asked, SAMPLED, step=1) for plan in (small, roomy))
    assert [done.token_ids for done in few] == [done.token_ids for done in many]
    assert_right(truth, asked, few)


def test_another_step_seed_row_or_sample_index_gives_another_sample(truth: Truth, engine: VllmEngine) -> None:
    request = Request((1, 2, 3), row=0, sample_index=0)
    (first,) = engine.generate([request], SAMPLED, step=1)
    asked = [request, replace(request, row=1), replace(request, sample_index=1)]
    again, row, index = engine.generate(asked, SAMPLED, step=1)
    (step,) = engine.generate([request], SAMPLED, step=2)
    (seed,) = start(truth, vllm_plan(seed=8)).generate([request], SAMPLED, step=1)
    assert again.token_ids == first.token_ids
    assert len({done.token_ids for done in (first, row, index, step, seed)}) == 5


def test_no_requests_no_completions(engine: VllmEngine) -> None:
    assert engine.generate([], SAMPLED, step=1) == []


def improbable(counts: Counter[int], probabilities: list[float]) -> float:
    """How many standard deviations the chi-square statistic is off (Wilson and Hilferty, 1931); tokens that are
    expected less than five times are one."""
    total = counts.total()
    common = [token for token, p in enumerate(probabilities) if p * total >= 5]
    rare = [token for token in range(len(probabilities)) if token not in common]
    pairs = [(counts[token], probabilities[token] * total) for token in common]
    pairs.append((sum(counts[t] for t in rare), math.fsum(probabilities[t] for t in rare) * total))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pairs)
    freedom = len(pairs) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("by", "sampling"),
    [("row", SAMPLED), ("sample_index", SAMPLED), ("row", WARM)],
    ids=["rows", "samples", "colder"],
)
def test_tokens_are_drawn_from_the_distribution_of_the_model(
    truth: Truth, by: str, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue("engine" if sampling is SAMPLED else "warm")
    prompt = [7, 21, 30, 2, 44]
    base = Request(tuple(prompt), row=3, sample_index=0)
    asked = [replace(base, **{by: k}) for k in range(3000)]
    found = [done.token_ids for done in engine.generate(asked, sampling, step=1)]
    first = Counter(tokens[0] for tokens in found)
    log_probs = oracle.next_log_probs(truth.plain, prompt, sampling.temperature)
    assert abs(improbable(first, [math.exp(x) for x in log_probs])) < 3.5
    (common, _), *_ = ((token, n) for token, n in first.most_common() if token not in STOPS)
    second = Counter(tokens[1] for tokens in found if tokens[0] == common)
    log_probs = oracle.next_log_probs(truth.plain, [*prompt, common], sampling.temperature)
    assert second.total() > 200
    assert abs(improbable(second, [math.exp(x) for x in log_probs])) < 3.5


def test_greedy_takes_the_likeliest_token(truth: Truth, engine: VllmEngine, warm: VllmEngine) -> None:
    asked = requests([1, 9, 4, 17, LONGEST])
    for each in (engine, warm):
        found = each.generate(asked, GREEDY, step=1)
        for request, done in zip(asked, found, strict=True):
            tokens, _, finish = oracle.generate(
                truth.plain, list(request.prompt_ids), [0.0] * LENGTH, GREEDY, set(STOPS)
            )
            assert (list(done.token_ids), done.finish) == (tokens, finish)
        assert_right(truth, asked, found)


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8}], ids=str)
def test_only_allowed_tokens_with_log_probs_of_all(truth: Truth, engine: VllmEngine, limits: dict[str, Any]) -> None:
    sampling = replace(SAMPLED, **limits)
    asked = requests([9, 4], n=8)
    found = engine.generate(asked, sampling, step=1)
    assert_right(truth, asked, found)
    for request, done in zip(asked, found, strict=True):
        for i, token in enumerate(done.token_ids):
            here = [*request.prompt_ids, *done.token_ids[:i]]
            assert token in oracle.candidates(oracle.next_log_probs(truth.plain, here, 1.0), sampling)
    prompt = requests([9])[0].prompt_ids
    first = engine.generate([Request(prompt, row, 0) for row in range(1000)], sampling, step=1)
    allowed = oracle.candidates(oracle.next_log_probs(truth.plain, list(prompt), 1.0), sampling)
    likely = {token for token, weight in allowed.items() if weight / sum(allowed.values()) > 0.02}
    assert likely <= {done.token_ids[0] for done in first} <= set(allowed)


def test_score_is_at_temperature_1(truth: Truth, engine: VllmEngine, warm: VllmEngine) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(VOCABULARY) for _ in range(LONGEST + LENGTH)]
    for prompt, response in ((ids[:1], ids[1:2]), (ids[:9], ids[9:20]), (ids[:LONGEST], ids[LONGEST:])):
        wanted = oracle.score(truth.plain, prompt, response)
        for each in (engine, warm):
            for _ in range(2):  # the second time its prefix has been seen
                assert each.score(prompt, response) == pytest.approx(wanted, abs=TOLERANCE, rel=0)


def test_asleep_it_does_nothing_and_awake_it_is_as_before(engine: VllmEngine) -> None:
    asked = requests([9, 4])
    before = engine.generate(asked, SAMPLED, step=1)
    engine.sleep()
    engine.sleep()
    with pytest.raises(AssertionError, match="asleep"):
        engine.generate(asked, SAMPLED, step=1)
    with pytest.raises(AssertionError, match="asleep"):
        engine.score([1], [2])
    engine.wake()
    engine.wake()
    assert engine.generate(asked, SAMPLED, step=1) == before


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Without the norms of queries and keys; with biases."""
    other = write(tmp_path, family)
    assert_right(other, asked := requests([1, 9, LONGEST], n=2), start(other).generate(asked, SAMPLED, step=1))


def test_bfloat16_is_as_near_as_its_rounding(truth: Truth) -> None:
    asked = requests([9, LONGEST], n=3)
    found = start(truth, vllm_plan(vllm={"dtype": "bfloat16"})).generate(asked, SAMPLED, step=1)
    assert_right(truth, asked, found, tolerance=0.2)
    with pytest.raises(AssertionError):
        assert_right(truth, asked, found, tolerance=1e-4)
