"""The native engine against generation that recomputes everything for every token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.config.plan import Sampling
from corral.rollout.base import Completion, Request
from corral.rollout.native import NativeEngine
from tests.rollout import oracle
from tests.rollout.models import GREEDY, SAMPLED, VOCABULARY, build, rollout_plan

STOPS = (3, 11)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature zero": replace(SAMPLED, temperature=0.0),
    "plain": SAMPLED,
    "hot": replace(SAMPLED, temperature=1.7),
    "cold": replace(SAMPLED, temperature=0.5),
    "top_k": replace(SAMPLED, top_k=5),
    "top_p": replace(SAMPLED, top_p=0.7),
    "both": replace(SAMPLED, temperature=1.2, top_k=10, top_p=0.8),
}


def requests(lengths: list[int], n: int = 1, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(length)) for length in lengths]
    return [Request(prompt, row=10 + i, sample_index=k) for i, prompt in enumerate(prompts) for k in range(n)]


def expected(model: torch.nn.Module, request: Request, sampling: Sampling, *, step: int, length: int) -> Completion:
    uniform = oracle.stream(7, step, request.row, request.sample_index, length)
    tokens, log_probs, finish = oracle.generate(model, list(request.prompt_ids), uniform, sampling, set(STOPS))
    return Completion(tuple(tokens), tuple(log_probs), finish)


def assert_same(found: Completion, wanted: Completion, tolerance: float) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.finish == wanted.finish
    assert found.log_probs == pytest.approx(wanted.log_probs, abs=tolerance, rel=0)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_tokens_and_log_probs_equal_a_full_forward_for_every_token(family: str, sampling: Sampling) -> None:
    plain = build(family, attention=oracle.ORACLE_ATTENTION)
    plan = rollout_plan(max_num_seqs=3)
    engine = NativeEngine(build(family), eos_token_ids=STOPS, plan=plan, max_length=128)
    asked = requests([1, 9, 4, 17], n=2)
    found = engine.generate(asked, sampling, step=5)
    for request, completion in zip(asked, found, strict=True):
        assert_same(completion, expected(plain, request, sampling, step=5, length=12), 1e-10)


def test_the_comparison_covers_both_ways_to_finish() -> None:
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=rollout_plan(), max_length=128)
    found = engine.generate(requests([1, 9, 4, 17], n=4), SAMPLED, step=5)
    assert {c.finish for c in found} == {"stop", "length"}
    assert len({len(c.token_ids) for c in found}) > 3


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_recorded_log_probs_match_transformers_eager_attention_in_fp32(family: str) -> None:
    eager = build(family, torch.float32, attention="eager")
    engine = NativeEngine(build(family, torch.float32), eos_token_ids=STOPS, plan=rollout_plan(), max_length=128)
    sampling = replace(SAMPLED, temperature=1.3, top_k=20, top_p=0.9)
    asked = requests([1, 9, 23], n=3)
    for request, done in zip(asked, engine.generate(asked, sampling, step=1), strict=True):
        wanted = oracle.score(eager, list(request.prompt_ids), list(done.token_ids), temperature=1.3)
        assert done.log_probs == pytest.approx(wanted, abs=1e-5, rel=0)


@pytest.fixture(scope="module")
def alone() -> dict[Request, Completion]:
    """Every request generated in a call of its own."""
    plan = rollout_plan(max_num_seqs=1)
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=plan, max_length=128)
    asked = requests([1, 9, 4, 17, 2], n=3)
    return {request: engine.generate([request], SAMPLED, step=2)[0] for request in asked}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_sample_does_not_depend_on_its_batch(alone: dict[Request, Completion], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(list(alone)), min_size=1, unique=True))
    plan = rollout_plan(max_num_seqs=data.draw(st.integers(1, 16)))
    cache_bytes = data.draw(st.sampled_from([1, 40_000, 1 << 30]))
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=plan, max_length=128, cache_bytes=cache_bytes)
    for request, done in zip(chosen, engine.generate(chosen, SAMPLED, step=2), strict=True):
        assert_same(done, alone[request], 1e-10)


def test_prompts_beyond_one_packed_prefill_change_nothing(
    alone: dict[Request, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.rollout.native._PREFILL_TOKENS", 10)
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=rollout_plan(), max_length=128)
    for request, done in zip(alone, engine.generate(list(alone), SAMPLED, step=2), strict=True):
        assert_same(done, alone[request], 1e-10)


def test_another_step_seed_row_or_sample_index_gives_another_sample() -> None:
    module = build("qwen3")
    request = Request((1, 2, 3), row=0, sample_index=0)

    def tokens(seed: int, step: int, asked: Request) -> tuple[int, ...]:
        plan = rollout_plan(ignore_eos=True, response_length=24, seed=seed)
        return (
            NativeEngine(module, eos_token_ids=(), plan=plan, max_length=128)
            .generate([asked], SAMPLED, step=step)[0]
            .token_ids
        )

    variants = [
        tokens(7, 1, request),
        tokens(8, 1, request),
        tokens(7, 2, request),
        tokens(7, 1, replace(request, row=1)),
        tokens(7, 1, replace(request, sample_index=1)),
    ]
    assert len(set(variants)) == 5
    assert tokens(7, 1, request) == variants[0]


def test_a_response_ends_with_any_of_the_end_tokens_or_at_the_cap() -> None:
    module = build("qwen3")
    plan = rollout_plan(ignore_eos=True)
    asked = requests([5])
    free = NativeEngine(module, eos_token_ids=STOPS, plan=plan, max_length=128).generate(asked, SAMPLED, step=1)[0]
    assert (len(free.token_ids), free.finish) == (12, "length")
    # Each position in turn becomes the first end token; the last one is an end token exactly at the cap.
    for at, token in enumerate(free.token_ids):
        first = free.token_ids.index(token)
        for stops in ((token,), (VOCABULARY - 1 if token != VOCABULARY - 1 else 0, token)):
            engine = NativeEngine(module, eos_token_ids=stops, plan=rollout_plan(), max_length=128)
            done = engine.generate(asked, SAMPLED, step=1)[0]
            end = min([first] + [free.token_ids.index(s) for s in stops if s in free.token_ids])
            assert end <= at
            assert done.token_ids == free.token_ids[: end + 1]
            assert done.finish == "stop"


def test_ignore_eos_runs_to_the_cap_whatever_is_sampled() -> None:
    plan = rollout_plan(ignore_eos=True)
    every = tuple(range(VOCABULARY))
    engine = NativeEngine(build("qwen3"), eos_token_ids=every, plan=plan, max_length=128)
    found = engine.generate(requests([3, 8]), SAMPLED, step=1)
    assert [(len(c.token_ids), c.finish) for c in found] == [(12, "length")] * 2


def test_a_cap_of_one_token() -> None:
    plan = rollout_plan(response_length=1, max_num_seqs=2)
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=plan, max_length=128)
    asked = requests([3, 8, 1, 4, 6])
    found = engine.generate(asked, SAMPLED, step=1)
    plain = build("qwen3", attention=oracle.ORACLE_ATTENTION)
    for request, done in zip(asked, found, strict=True):
        assert_same(done, expected(plain, request, SAMPLED, step=1, length=1), 1e-10)


def test_no_requests_no_completions() -> None:
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=rollout_plan(), max_length=128)
    assert engine.generate([], SAMPLED, step=1) == []


def test_top_k_one_takes_the_greedy_tokens() -> None:
    engine = NativeEngine(build("llama"), eos_token_ids=STOPS, plan=rollout_plan(), max_length=128)
    asked = requests([1, 9, 4])
    greedy = engine.generate(asked, GREEDY, step=1)
    top = engine.generate(asked, replace(SAMPLED, top_k=1), step=1)
    assert [c.token_ids for c in top] == [c.token_ids for c in greedy]


def test_a_prompt_that_does_not_fit_the_model_is_a_bug_of_the_caller() -> None:
    engine = NativeEngine(build("qwen3"), eos_token_ids=STOPS, plan=rollout_plan(), max_length=16)
    assert len(engine.generate(requests([4]), SAMPLED, step=1)) == 1
    with pytest.raises(AssertionError, match="17 tokens for a model of 16 positions"):
        engine.generate(requests([5]), SAMPLED, step=1)
