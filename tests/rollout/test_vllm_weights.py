"""New weights for the real vllm, in place: what it generates and scores follows them alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from corral.rollout.vllm import VllmEngine
from tests.rollout.models import VOCABULARY
from tests.rollout.vllm_engines import (
    LONG,
    Truth,
    assert_follows,
    assert_follows_updates,
    close_all,
    needs_vllm,
    start,
    vllm_plan,
    write,
)

pytestmark = needs_vllm

Weights = list[tuple[str, Tensor]]

MODELS = {
    "untied": ("qwen3", False),
    "tied": ("qwen3", True),
    "biased": ("qwen2", False),
    "tied, biased": ("qwen2", True),
}


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[VllmEngine, Truth]:
    family, tied = request.param
    truth = write(tmp_path_factory.mktemp("model"), family, tied=tied)
    return start(truth, vllm_plan(prompt_length=LONG)), truth


def test_it_follows_new_weights_again_and_again(pair: tuple[VllmEngine, Truth]) -> None:
    assert_follows_updates(*pair)


def test_weights_may_come_one_by_one_in_any_order(pair: tuple[VllmEngine, Truth]) -> None:
    """As a sharded trainer makes them: each is made when it is asked for, and nobody else keeps it."""
    engine, truth = pair
    weights = truth.weights(seed=9)
    random.Random(0).shuffle(weights)
    engine.update_weights((name, tensor.clone()) for name, tensor in weights)
    truth.take(weights)
    assert_follows(engine, truth, step=1)


def test_other_dtypes_are_cast(pair: tuple[VllmEngine, Truth]) -> None:
    engine, truth = pair
    weights = truth.weights(seed=10)
    engine.update_weights([(name, tensor.double()) for name, tensor in weights])
    truth.take(weights)
    assert_follows(engine, truth, step=1)


def test_an_engine_of_dummies_takes_its_first_weights(pair: tuple[VllmEngine, Truth]) -> None:
    _, truth = pair
    engine = start(truth, vllm_plan(prompt_length=LONG, vllm={"load_format": "dummy"}))
    weights = truth.weights(seed=11)
    engine.update_weights(weights)
    truth.take(weights)
    assert_follows(engine, truth, step=1)


def replaced(name: str, tensor: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: [(each, tensor if each == name else given) for each, given in weights]


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: [(name, tensor) for name, tensor in weights if part not in name]


WRONG: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "unknown": (lambda weights: [*weights, ("model.what.weight", torch.zeros(2))], "what"),
    "twice": (lambda weights: [*weights, weights[3]], "came twice"),
    "none": (lambda _: [], "19 of 19 weights did not arrive"),
    "missing": (without("layers.1.mlp.down_proj"), "1 of 19 weights did not arrive.*layers.1.mlp.down_proj"),
    "missing head": (without("lm_head"), "1 of 19 weights did not arrive.*lm_head"),
    "short norm": (replaced("model.norm.weight", torch.zeros(127)), "model.norm.weight"),
    "narrow": (replaced("model.layers.0.mlp.down_proj.weight", torch.zeros(128, 63)), "mlp.down_proj.weight"),
    "short": (replaced("model.layers.0.self_attn.q_proj.weight", torch.zeros(127, 128)), "layers.0.self_attn"),
    "small head": (replaced("lm_head.weight", torch.zeros(VOCABULARY - 1, 128)), "lm_head.weight"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG.keys())
def test_weights_that_are_not_those_of_the_model(
    change: Callable[[Weights], Weights], said: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    truth = write(tmp_path_factory.mktemp("model"))
    engine = start(truth)
    with pytest.raises(ValueError, match=said):
        engine.update_weights(change(truth.weights(seed=1)))


def test_an_error_of_the_trainer_passes_through(tmp_path_factory: pytest.TempPathFactory) -> None:
    truth = write(tmp_path_factory.mktemp("model"))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield truth.weights(seed=1)[0]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        start(truth).update_weights(broken())
