"""Offload moves real storage and gives back the same bits. Device and host are both the CPU: moves are copies."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from corral.engine.engine import Engine
from corral.engine.offload import Parking
from corral.engine.rank import Rank
from tests.engine.parity import share_of
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch

CPU = torch.device("cpu")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages(engine: Engine) -> dict[str, int]:
    """Where each local tensor's memory is: parameters by name, optimizer state by parameter index and name."""
    assert engine.optimizer is not None
    out = {name: local(p.detach()).untyped_storage().data_ptr() for name, p in engine.module.named_parameters()}
    for index, state in enumerate(engine.optimizer.state.values()):
        out |= {f"state {index} {name}": local(v).untyped_storage().data_ptr() for name, v in state.items()}
    return {name: at for name, at in out.items() if at}  # a rank may hold an empty shard


def values(engine: Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    state = [local(v) for s in engine.optimizer.state.values() for v in s.values()]
    return [t.clone() for t in [*(local(p.detach()) for p in engine.module.parameters()), *state]]


def trained(rank: Rank, folder: Path, parked: bool) -> dict[str, Tensor]:
    """Weights after three steps; between any two of them everything is parked and brought back if `parked`."""
    engine = Engine(engine_plan(folder, dp=rank.world), rank, horizon=1)
    batch = random_batch()
    share, micro, _ = share_of(batch, engine, engine.plan.infer)
    parking = Parking(engine.module, engine.optimizer, CPU, CPU, parameters=parked, optimizer_state=parked, copy=True)
    for _ in range(3):
        outside = storages(engine), values(engine)
        with parking.loaded(optimizer=True):
            assert all(torch.equal(a, b) for a, b in zip(outside[1], values(engine), strict=True))
            moved = {name for name, at in storages(engine).items() if outside[0][name] != at}
            assert moved == (set(outside[0]) if parked else set())
            engine.train_step(share, micro, objective("actor", batch))
            inside = storages(engine), values(engine)
        assert all(torch.equal(a, b) for a, b in zip(inside[1], values(engine), strict=True))
        assert all((inside[0][name] != at) == parked for name, at in storages(engine).items())
    assert any("exp_avg" in name for name in storages(engine))
    return {name: weight.clone() for name, weight in engine.full_weights()}


def trained_both_ways(rank: Rank, folder: Path) -> bool:
    parked, resident = trained(rank, folder, True), trained(rank, folder, False)
    return all(torch.equal(parked[name], resident[name]) for name in resident)


def test_training_does_not_notice_in_one_process(models: dict[str, Path]) -> None:
    assert trained_both_ways(Rank(), models["qwen3"])


def test_training_does_not_notice_when_sharded(models: dict[str, Path]) -> None:
    assert on_ranks(2, trained_both_ways, models["qwen3-tied"]) == [True, True]


def test_scoring_brings_parameters_only_and_may_be_nested(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    batch = random_batch(3)
    engine.train_step(batch, [[0, 1, 2]], objective("actor", batch))
    parking = Parking(engine.module, engine.optimizer, CPU, CPU, parameters=True, optimizer_state=True, copy=True)
    outside = storages(engine)
    with parking.loaded(optimizer=False):
        inside = storages(engine)
        assert {name for name in inside if inside[name] == outside[name]} == {
            n for n in inside if n.startswith("state")
        }
        with parking.loaded(optimizer=True):
            nested = storages(engine)
            assert {n for n in nested if nested[n] != inside[n]} == {n for n in inside if n.startswith("state")}
        assert {n: at for n, at in storages(engine).items() if not n.startswith("state")} == {
            n: at for n, at in inside.items() if not n.startswith("state")
        }


def test_an_error_inside_still_parks(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    parking = Parking(engine.module, engine.optimizer, CPU, CPU, parameters=True, optimizer_state=True, copy=True)
    seen: list[dict[str, int]] = []

    def fail() -> None:
        seen.append(storages(engine))
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), parking.loaded(optimizer=True):
        fail()
    assert all(at != seen[0][name] for name, at in storages(engine).items())


def test_on_the_cpu_it_is_a_no_op_that_says_so_once(models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="corral.engine.offload"):
        engine = Engine(engine_plan(models["qwen3"], param_offload=True, optimizer_offload=True), Rank(), horizon=1)
        before = storages(engine)
        for _ in range(2):
            with engine.loaded(optimizer=True):
                assert storages(engine) == before
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "offload is set, but the device's memory is the host's (cpu)"
    ]
    assert not dist.is_initialized()
