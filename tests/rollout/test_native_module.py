"""What the native engine does to, and takes from, the module it decodes on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from corral.engine.attention import CONTEXT, PackedAttention
from corral.engine.model import checkpoint_layers
from corral.errors import TrainingError
from corral.rollout.base import Request
from corral.rollout.native import NativeEngine
from tests.rollout import oracle
from tests.rollout.models import SAMPLED, VOCABULARY, build, rollout_plan

REQUESTS = [Request((5, 9, 2, 40), row=0, sample_index=0), Request((7,), row=1, sample_index=0)]
PROMPT, RESPONSE = [4, 8, 15], [16, 23, 42, 1]


def engine_on(module: nn.Module, **changes: object) -> NativeEngine:
    return NativeEngine(module, eos_token_ids=(3,), plan=rollout_plan(), max_length=128, **changes)


def packed_logits(module: nn.Module, ids: list[int]) -> Tensor:
    context = PackedAttention((0, len(ids)))
    return module(input_ids=torch.tensor([ids]), use_cache=False, **{CONTEXT: context}).logits


def gradients(module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    packed_logits(module, [1, 2, 3, 4]).square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def test_a_training_module_is_left_as_it_was() -> None:
    module = build("qwen3").train()
    checkpoint_layers(module)
    module.model.layers[1].eval()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    flags = {name: (m.training, getattr(m, "gradient_checkpointing", None)) for name, m in module.named_modules()}
    assert {training for training, _ in flags.values()} == {True, False}
    assert any(checkpointing for _, checkpointing in flags.values())
    random_state = torch.random.get_rng_state()
    before = gradients(module)

    found = engine_on(module).generate(REQUESTS, SAMPLED, step=1)

    assert found == engine_on(build("qwen3")).generate(REQUESTS, SAMPLED, step=1)
    assert flags == {
        name: (m.training, getattr(m, "gradient_checkpointing", None)) for name, m in module.named_modules()
    }
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert all(torch.equal(weights[name], p) and p.requires_grad for name, p in module.named_parameters())
    after = gradients(module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_flags_come_back_after_a_failure() -> None:
    module = build("qwen3").train()
    with torch.no_grad():
        module.lm_head.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match="logits are not finite"):
        engine_on(module).generate(REQUESTS, SAMPLED, step=1)
    assert all(m.training for m in module.modules())
    assert torch.is_grad_enabled()


def test_broken_weights_leave_nothing_in_the_cache() -> None:
    module = build("qwen3")
    engine = engine_on(module)
    engine.generate([Request(tuple(range(20)), row=0, sample_index=0), *REQUESTS], SAMPLED, step=1)
    wanted = engine.generate(REQUESTS, SAMPLED, step=1)
    good = {name: p.detach().clone() for name, p in module.named_parameters()}
    engine.update_weights((name, torch.full_like(p, math.nan)) for name, p in good.items())
    # Longer prompts than the ones that follow: their keys lie where a later sequence is still to come.
    with pytest.raises(TrainingError):
        engine.generate([Request(tuple(range(14)), row=0, sample_index=k) for k in range(2)], SAMPLED, step=1)
    engine.update_weights(good.items())
    assert engine.generate(REQUESTS, SAMPLED, step=1) == wanted


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_score_is_that_of_a_full_forward_and_follows_the_weights(family: str) -> None:
    engine = engine_on(build(family))
    old = oracle.score(build(family, attention=oracle.ORACLE_ATTENTION), PROMPT, RESPONSE)
    new = oracle.score(build(family, attention=oracle.ORACLE_ATTENTION, seed=1), PROMPT, RESPONSE)
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1
    assert engine.score(PROMPT, RESPONSE) == pytest.approx(old, abs=1e-10, rel=0)
    engine.update_weights((name, p.detach()) for name, p in build(family, seed=1).named_parameters())
    assert engine.score(PROMPT, RESPONSE) == pytest.approx(new, abs=1e-10, rel=0)
    assert engine.score(PROMPT, []) == []


def test_score_repeats_the_recorded_log_probs() -> None:
    engine = engine_on(build("qwen3"))
    for request, done in zip(REQUESTS, engine.generate(REQUESTS, SAMPLED, step=1), strict=True):
        assert engine.score(request.prompt_ids, done.token_ids) == pytest.approx(done.log_probs, abs=1e-10, rel=0)


def test_new_weights_reach_generation_in_place() -> None:
    module, other = build("qwen3"), build("qwen3", seed=1)
    places = {name: p.data_ptr() for name, p in module.named_parameters()}
    engine = engine_on(module)
    old = engine.generate(REQUESTS, SAMPLED, step=1)
    engine.update_weights((name, p.detach()) for name, p in other.named_parameters())
    new = engine.generate(REQUESTS, SAMPLED, step=1)
    assert new != old
    assert new == engine_on(other).generate(REQUESTS, SAMPLED, step=1)
    assert places == {name: p.data_ptr() for name, p in module.named_parameters()}


def test_tied_weights_arrive_once_and_count_twice() -> None:
    engine = engine_on(build("qwen3", tie_word_embeddings=True))
    other = build("qwen3", seed=1, tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(other.named_parameters())
    engine.update_weights((name, p.detach()) for name, p in other.named_parameters())
    assert engine.score(PROMPT, RESPONSE) == engine_on(other).score(PROMPT, RESPONSE)


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    engine = engine_on(build("qwen3"))
    weights = {name: p.detach() for name, p in build("qwen3", seed=1).named_parameters()}
    head = "lm_head.weight"
    with pytest.raises(ValueError, match=r"'extra' is not in the rollout model"):
        engine.update_weights([*weights.items(), ("extra", torch.zeros(1))])
    with pytest.raises(ValueError, match=rf"'{head}' came twice"):
        engine.update_weights([*weights.items(), (head, weights[head])])
    with pytest.raises(ValueError, match=rf"'{head}' has shape \(1, 32\), expected \({VOCABULARY}, 32\)"):
        engine.update_weights({**weights, head: weights[head][:1]}.items())
    with pytest.raises(ValueError, match=rf"1 of {len(weights)} weights did not arrive, among them '{head}'"):
        engine.update_weights((name, w) for name, w in weights.items() if name != head)


def test_sleep_frees_the_cache_and_wake_brings_generation_back() -> None:
    engine = engine_on(build("qwen3"))
    before = engine.generate(REQUESTS, SAMPLED, step=1)
    engine.sleep()
    assert engine.cache_allocated == 0
    with pytest.raises(AssertionError, match="asleep"):
        engine.generate(REQUESTS, SAMPLED, step=1)
    engine.wake()
    assert engine.generate(REQUESTS, SAMPLED, step=1) == before
    assert engine.cache_allocated > 0


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "bf16 autocast"])
def test_bf16_log_probs_are_close_to_the_trainers(autocast: bool) -> None:
    module = build("qwen3", torch.float32 if autocast else torch.bfloat16)
    engine = engine_on(module, compute_dtype=torch.bfloat16)
    done = engine.generate(REQUESTS, SAMPLED, step=1)[0]
    ids = [*REQUESTS[0].prompt_ids, *done.token_ids]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = packed_logits(module, ids)[0, len(REQUESTS[0].prompt_ids) - 1 : -1]
    assert logits.dtype == torch.bfloat16
    wanted = logits.double().log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert done.log_probs == pytest.approx(wanted.tolist(), abs=0.15, rel=0)
