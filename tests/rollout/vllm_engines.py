"""Engines of the real vllm on the CPU, each with the model that says what is right, in float64."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from corral.config.plan import Model, RolloutPlan, VllmPlan
from corral.engine.rank import Rank
from corral.rollout.base import Request
from corral.rollout.vllm import VllmEngine
from tests.rollout import oracle
from tests.rollout.models import SAMPLED, VOCABULARY, build, rollout_plan

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

STOPS = (3, 11)
LONG = 300
"""Tokens of a prompt: the prefix cache keeps whole blocks, of 128 here."""
TOLERANCE = 4e-5
"""Of float32 over so many tokens."""
_SHAPE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Truth:
    """The weights an engine was started with: `plain` computes in float64, `path` is its folder."""

    family: str
    tied: bool
    plain: nn.Module
    path: Path

    def weights(self, seed: int) -> list[tuple[str, Tensor]]:
        """Others for the same model, as the trainer gives them: by name, tied ones once."""
        return [(name, parameter.detach()) for name, parameter in _float32(self.family, self.tied, seed).items()]

    def take(self, weights: list[tuple[str, Tensor]]) -> None:
        """From now on these are the right ones."""
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                parameter.copy_(dict(weights)[name])


def write(folder: Path, family: str = "qwen3", *, tied: bool = False) -> Truth:
    model = _built(family, torch.float32, tied)
    _fill(model, _float32(family, tied, seed=0))
    model.save_pretrained(folder)
    plain = _built(family, torch.float64, tied, attention=oracle.ORACLE_ATTENTION)
    plain.config._experts_implementation = "eager"  # the others compute in float32
    truth = Truth(family, tied, plain, folder)
    truth.take(truth.weights(seed=0))
    return truth


def _built(family: str, dtype: torch.dtype, tied: bool, **how: Any) -> Any:
    shape = _SHAPE | (_EXPERTS if family.endswith("moe") else {})
    return build(family, dtype, tie_word_embeddings=tied, **shape, **how)


def _float32(family: str, tied: bool, seed: int) -> dict[str, Tensor]:
    """Norms and biases, which start at 1 and 0, are random too."""
    model = _built(family, torch.float32, tied, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    flat = {name: p.detach() for name, p in model.named_parameters() if p.ndim == 1}
    noise = {name: p + 0.3 * torch.randn(p.shape, generator=generator) for name, p in flat.items()}
    return {name: p.detach() for name, p in model.named_parameters()} | noise


def _fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def vllm_plan(*, vllm: dict[str, Any] | None = None, **changes: Any) -> RolloutPlan:
    """Room for the longest sample and no more; `vllm` are changes of its own options."""
    plan = replace(rollout_plan(), **changes)
    longest = plan.prompt_length + plan.response_length + 1
    options = VllmPlan(
        dtype="float32",
        gpu_memory_utilization=0.1,
        cache_bytes=64 << 20,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        enforce_eager=True,
        sleeps=False,
        max_num_batched_tokens=max(256, longest),
        max_model_len=longest,
        load_format="auto",
        engine_kwargs={},
    )
    return replace(plan, name="vllm", requested="vllm", vllm=replace(options, **(vllm or {})))


_STARTED: list[VllmEngine] = []


def start(truth: Truth, plan: RolloutPlan | None = None, stops: tuple[int, ...] = STOPS) -> VllmEngine:
    """Until close_all(): the engines of a process share groups, which end with any of them, dropped or closed."""
    model = Model(str(truth.path), str(truth.path), False, {}, gradient_checkpointing=False)
    engine = VllmEngine(model, Rank(), eos_token_ids=stops, plan=plan or vllm_plan())
    _STARTED.append(engine)
    return engine


def close_all() -> None:
    with patch("gc.collect"):  # seconds in a process of this size, and each of them asks for it twice
        while _STARTED:
            _STARTED.pop().close()
    gc.collect()


def requests(lengths: list[int], n: int = 1, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(length)) for length in lengths]
    return [Request(prompt, row=10 + i, sample_index=k) for i, prompt in enumerate(prompts) for k in range(n)]


def assert_follows(engine: VllmEngine, truth: Truth, step: int) -> None:
    """What it generates and scores after the same prompts as ever is by the right weights."""
    rng = random.Random(0)
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(LONG))
    asked = [Request(prompt[:length], row, 0) for row, length in enumerate((LONG, LONG, 5))]
    for request, done in zip(asked, engine.generate(asked, SAMPLED, step=step), strict=True):
        wanted = oracle.score(truth.plain, list(request.prompt_ids), list(done.token_ids))
        assert done.log_probs == pytest.approx(wanted, abs=TOLERANCE, rel=0)
    response = [rng.randrange(VOCABULARY) for _ in range(4)]
    assert engine.score(prompt, response) == pytest.approx(
        oracle.score(truth.plain, list(prompt), response), abs=TOLERANCE, rel=0
    )


def assert_follows_updates(engine: VllmEngine, truth: Truth) -> None:
    """Its first weights, and twice others."""
    assert_follows(engine, truth, step=1)
    for step in (2, 3):
        weights = truth.weights(seed=step)
        engine.update_weights(weights)
        truth.take(weights)
        assert_follows(engine, truth, step)
