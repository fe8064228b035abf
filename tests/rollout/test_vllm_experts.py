"""A mixture of experts in the real vllm: named and laid out in the trainer as nowhere else, and packed on the CPU.

In a module of its own, as the groups that the first engine of a process makes have to be those of experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corral.rollout.vllm import VllmEngine
from tests.rollout.vllm_engines import (
    LONG,
    Truth,
    assert_follows_updates,
    close_all,
    needs_vllm,
    start,
    vllm_plan,
    write,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, Truth]]:
    truth = write(tmp_path_factory.mktemp("model"), "qwen3_moe")
    yield start(truth, vllm_plan(prompt_length=LONG)), truth
    close_all()


def test_it_follows_new_weights_again_and_again(pair: tuple[VllmEngine, Truth]) -> None:
    assert any(name.endswith("experts.gate_up_proj") for name, _ in pair[1].weights(seed=1))
    assert_follows_updates(*pair)


def test_an_expert_that_is_missing_is_said(pair: tuple[VllmEngine, Truth]) -> None:
    _, truth = pair
    engine = start(truth)
    with pytest.raises(ValueError, match=r"1 of \d+ weights did not arrive.*layers\.0\..*w2"):
        engine.update_weights([each for each in truth.weights(seed=1) if "layers.0.mlp.experts.down" not in each[0]])
