"""The schedule, in iterations, and the optimizer it drives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.engine.engine import Engine
from corral.engine.optim import learning_rate
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.small import engine_plan, objective, optimizer, random_batch


def rates(horizon: int, **changes: object) -> list[float]:
    plan = optimizer(lr=1.0, **changes)
    return [learning_rate(plan, k, horizon) for k in range(horizon)]


def test_constant_with_and_without_warmup() -> None:
    assert rates(4) == [1.0] * 4
    assert rates(5, lr_warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(6, lr_warmup_steps_ratio=0.5) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])
    assert rates(4, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1.0] * 4  # a count wins over the ratio


def test_linear_and_cosine_by_hand() -> None:
    assert rates(4, lr_scheduler_type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(4, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates(4, lr_scheduler_type="cosine") == pytest.approx(
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    assert rates(3, lr_scheduler_type="cosine", min_lr_ratio=0.1, lr_warmup_steps=1) == pytest.approx([1.0, 1.0, 0.55])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 50),
    st.integers(-1, 20),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_never_zero_at_first_and_always_within_bounds(
    kind: str, horizon: int, warmup: int, ratio: float, floor: float
) -> None:
    out = rates(
        horizon, lr_scheduler_type=kind, lr_warmup_steps=warmup, lr_warmup_steps_ratio=ratio, min_lr_ratio=floor
    )
    assert out[0] > 0
    assert all(0 <= rate <= 1 for rate in out)
    plan = optimizer(lr=1.0, lr_scheduler_type=kind, min_lr_ratio=floor)
    assert learning_rate(plan, 10 * horizon, horizon) == pytest.approx(1.0 if kind == "constant" else floor, abs=1e-12)


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="'step' is not one of constant, linear, cosine"):
        rates(2, lr_scheduler_type="step")


def test_the_engine_counts_iterations_not_optimizer_steps(models: dict[str, Path]) -> None:
    plan = engine_plan(models["qwen3"], optim=optimizer(lr=0.01, lr_scheduler_type="linear", lr_warmup_steps=1))
    engine = Engine(plan, Rank(), horizon=5)
    batch = random_batch(3)
    assert engine.lr == 0.01
    for _ in range(3):
        engine.train_step(batch, [[0, 1, 2]], objective("actor", batch))
    assert engine.lr == 0.01
    assert engine.end_iteration() == 0.01
    assert engine.end_iteration() == pytest.approx(0.0075)
    assert engine.lr == pytest.approx(0.0075)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [{"lr_warmup_steps": 3}, {"lr_warmup_steps_ratio": 0.3}, {}])
def test_an_engine_set_to_an_iteration_goes_on_with_the_same_rates(
    models: dict[str, Path], kind: str, warmup: dict[str, float]
) -> None:
    """What a resumed run does: the rate is a function of the iteration alone, so nothing is applied twice."""
    optim = optimizer(lr=0.01, lr_scheduler_type=kind, min_lr_ratio=0.1, **warmup)
    plan = engine_plan(models["qwen3"], optim=optim)
    through = Engine(plan, Rank(), horizon=8)
    rates = [through.lr, *(through.end_iteration() for _ in range(7))]
    for k in (1, 2, 3, 5, 7):
        resumed = Engine(plan, Rank(), horizon=8)
        resumed.iteration = k
        assert [resumed.lr, *(resumed.end_iteration() for _ in range(7 - k))] == rates[k:]


def test_steps_are_adamw_on_the_clipped_gradient(models: dict[str, Path]) -> None:
    """Two steps at different rates against AdamW written out."""
    optim = optimizer(lr=0.01, weight_decay=0.1, clip_grad=0.05, lr_scheduler_type="linear", betas=(0.8, 0.95))
    engine = Engine(engine_plan(models["qwen3"], dtype="float64", optim=optim), Rank(), horizon=2)
    batch = random_batch(dtype=torch.float64)
    weight = engine.module.lm_head.weight
    grads: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.clone()))
    x, m, v = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t in (1, 2):
        rate = engine.lr
        step = engine.train_step(batch, [list(range(len(batch)))], objective("actor", batch))
        assert step.grad_norm > 0.05
        grad = grads[-1] * (0.05 / (step.grad_norm + 1e-6))
        m, v = 0.8 * m + 0.2 * grad, 0.95 * v + 0.05 * grad**2
        x = x * (1 - rate * 0.1) - rate * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        engine.end_iteration()
    assert torch.allclose(weight, x, rtol=0, atol=1e-12)


def test_an_engine_without_optimizer_does_not_train(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"], "ref", optim=None, train=None), Rank(), horizon=1)
    batch = random_batch(2)
    with pytest.raises(ValueError, match="ref was built without an optimizer"):
        engine.train_step(batch, [[0, 1]], objective("actor", batch))
