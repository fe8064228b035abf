"""What full determinism means for a backward pass on cuda: switches of the process, seen from inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from corral.engine import engine as engine_module
from corral.engine.device import deterministic_backward
from corral.engine.engine import Engine
from corral.engine.rank import Rank
from tests.engine.small import engine_plan, objective, random_batch

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def state() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("device", "before", "inside"),
    [
        ("cuda", (True, True), (True, False)),  # else PyTorch's fused attention is not deterministic
        ("cuda", (True, False), (True, False)),
        ("cuda", (False, False), (False, False)),
        ("cpu", (True, True), (True, True)),
    ],
)
def test_backward_is_strict_on_cuda_alone(device: str, before: tuple[bool, bool], inside: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    with deterministic_backward(torch.device(device)):
        assert state() == inside
    assert state() == before


def test_the_switch_comes_back_after_an_error() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_backward(CUDA):
        raise RuntimeError("out of memory")
    assert state() == (True, True)


def test_an_update_is_strict_in_its_backward_pass(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_cuda(device: torch.device) -> AbstractContextManager[None]:
        return deterministic_backward(CUDA)

    monkeypatch.setattr(engine_module, "deterministic_backward", as_on_cuda)
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    batch = random_batch()
    seen = []
    next(engine.module.parameters()).register_hook(lambda gradient: seen.append(state()))
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine.train_step(batch, [list(range(len(batch)))], objective("actor", batch))
    assert set(seen) == {(True, False)}
    assert state() == (True, True)
