"""What offload frees and what it takes, by an allocation counter; and that nobody reads what is parked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corral.batch import Batch
from corral.engine.engine import Engine
from corral.engine.memory import DeviceMemory, bytes_of, local_part
from corral.engine.offload import Parking
from corral.engine.rank import Rank
from corral.rollout.base import Request
from corral.workers.worker import MiniBatch, Share, Worker
from tests.engine.arenas import DEVICE, HOST, Arenas
from tests.engine.parity import share_of
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch
from tests.plans import tiny_plan


def measured(rank: Rank, folder: Path) -> dict[str, tuple[int, int]]:
    """(device, host) bytes at the points of two phases, parameters and state offloaded; sizes under "held"."""
    arenas, seen = Arenas(), {}
    with pytest.MonkeyPatch.context() as patch:
        arenas.watch(patch)
        engine = Engine(engine_plan(folder, dp=rank.world), rank, horizon=1)
        batch = random_batch()
        share, micro, _ = share_of(batch, engine, engine.plan.infer)
        arenas.adopt("device", [*engine.module.parameters(), *engine.module.buffers()])
        before = arenas.bytes("device"), arenas.bytes("host")
        parking = Parking(engine.module, engine.optimizer, DEVICE, HOST, parameters=True, optimizer_state=True)

        def note(name: str) -> None:
            gc.collect()
            # A shard that is shorter than others is copied once more by FSDP2, which pads it.
            arenas.adopt("host" if "parked" in name else "device", engine.module.parameters())
            seen[name] = arenas.bytes("device"), arenas.bytes("host")

        seen["before"] = before
        note("parked")
        with parking.loaded(optimizer=True):
            note("first update")
            engine.train_step(share, micro, objective("actor", batch))
            assert all(p.grad is None for p in engine.module.parameters())
            assert engine.optimizer is not None
            arenas.adopt("device", [x for s in engine.optimizer.state.values() for x in s.values()])
            note("after a step")
        note("parked again")
        with parking.loaded(optimizer=False):
            note("scoring")
            engine.infer(share, micro)
            note("scored")
        note("parked at last")
        seen["held"] = parking.held("parameters"), parking.held("optimizer state")
    return seen


def check(seen: dict[str, tuple[int, int]]) -> None:
    parameters, state = seen["held"]
    assert seen["before"] == (parameters, 0)
    assert seen["parked"] == (0, parameters)
    assert seen["first update"] == (parameters, 0)  # the host's copies are gone, not kept beside
    assert seen["after a step"] == (parameters + state, 0)
    assert seen["parked again"] == (0, parameters + state)
    assert seen["scoring"] == seen["scored"] == (parameters, state)  # the state stays where it is
    assert seen["parked at last"] == (0, parameters + state)


def test_each_byte_is_in_one_place(models: dict[str, Path]) -> None:
    seen = measured(Rank(), models["qwen3"])
    check(seen)
    parameters, state = seen["held"]
    module = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1).module
    counted = sum(p.numel() for p in module.parameters())
    buffers = sum(b.numel() for b in module.buffers())
    assert parameters == 4 * (counted + buffers)
    assert state == 4 * (2 * counted + len(list(module.parameters())))  # two moments and a step counter each


class Poisoned(Parking):
    """Real copies, and what is parked holds nonsense until it is loaded again."""

    def __post_init__(self) -> None:
        self.copy = True
        self.kept: dict[str, list[Tensor]] = {}
        super().__post_init__()

    def _load(self, what: str) -> None:
        for x, values in zip(self._tensors(what), self.kept.pop(what, []), strict=True):
            assert bool(nonsense(x).all()), f"{what} was written to while it was parked"
            x.copy_(values)
        super()._load(what)

    def _park(self, what: str) -> None:
        super()._park(what)
        self.kept[what] = [x.clone() for x in self._tensors(what)]
        for x in self._tensors(what):
            x.fill_(torch.nan if x.is_floating_point() else 113)

    def _tensors(self, what: str) -> list[Tensor]:
        """This rank's part of each."""
        held: list[Any] = [*self.module.parameters(), *self.module.buffers()]
        if what != "parameters":
            assert self.optimizer is not None
            held = [x for s in self.optimizer.state.values() for x in s.values()]
        return [local_part(x).detach() for x in held]


def nonsense(x: Tensor) -> Tensor:
    return x.isnan() if x.is_floating_point() else x == 113


@contextmanager
def poisoned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.engine.engine.Parking", Poisoned)
        patch.setattr("corral.workers.worker.Parking", Poisoned)
        yield


def worked(rank: Rank, folder: Path, out: Path, offload: bool) -> list[Any]:
    """Everything a worker does in an iteration, and its results: of actor, critic and reference, all offloaded."""
    plan = tiny_plan(world=rank.world, path=str(folder))
    engines = {
        role: replace(engine, param_offload=offload, optimizer_offload=offload)
        for role, engine in (("actor", plan.actor), ("critic", plan.critic))
    }
    trainer = replace(plan.trainer, collective_check=False, run_dir=str(out), record_phases="full")
    worker = Worker(rank, replace(plan, **engines, ref=replace(engines["actor"], role="ref"), trainer=trainer), 2)
    batch = random_batch(6)
    probe = Batch.from_samples([[5, 9]], [[4, 3]], row=[0], sample_index=[0], group=[0], finish=["stop"])
    share = Share(batch.select(range(rank.rank, 6, rank.world)), [[0], list(range(1, 6 // rank.world))])
    results: list[Any] = []
    worker.start_rollout((2,))
    for step in (1, 2):
        results.append(worker.push_weights(probe))
        requests = [Request((5, 9, 3), row, rank.rank) for row in range(3)]
        results += [(c.token_ids, c.log_probs) for c in worker.generate(requests, plan.rollout.sampling, step)]
        results += [worker.infer(role, share, 1.0, False, False) for role in ("actor", "ref", "critic")]
        for role in ("critic", "actor"):
            mini = MiniBatch(share, objective(role, batch))
            steps, _ = worker.update(role, [mini, mini], 1.0, last=True)
            results += [(done.stats, done.grad_norm, done.skipped) for done in steps]
            results.append({k: v.whole for k, v in worker.recorded_weights(role).items()})
        for role in ("actor", "critic"):
            worker.save(role, str(out / f"{role}-{step}"), ("model", "optimizer", "extra", "hf_model"))
    worker.load("actor", str(out / "actor-1"))
    results.append({k: v.whole for k, v in worker.recorded_weights("actor").items()})
    return results


def both_ways(rank: Rank, folder: Path, out: Path) -> bool:
    plain = worked(rank, folder, out / "plain", offload=False)
    with poisoned():
        parked = worked(rank, folder, out / "parked", offload=True)
    torch.testing.assert_close(parked, plain, rtol=0, atol=0, equal_nan=False)
    return True


def test_no_phase_touches_what_is_parked(models: dict[str, Path], tmp_path: Path) -> None:
    assert both_ways(Rank(), models["qwen3"], tmp_path)


def sharded(rank: Rank, folder: Path, out: Path) -> tuple[dict[str, tuple[int, int]], bool]:
    return measured(rank, folder), both_ways(rank, folder, out)


def test_a_shard_is_in_one_place_and_no_phase_touches_it_there(models: dict[str, Path], tmp_path: Path) -> None:
    alone = measured(Rank(), models["qwen3-tied"])["held"]
    for seen, untouched in on_ranks(2, sharded, models["qwen3-tied"], tmp_path):
        check(seen)
        assert seen["held"][0] < 0.6 * alone[0]
        assert seen["held"][1] < 0.6 * alone[1]
        assert untouched


def test_poison_is_noticed(models: dict[str, Path]) -> None:
    """The tests above can fail: a phase that loads nothing reads nonsense."""
    batch = random_batch(3)
    with poisoned():
        engine = Engine(engine_plan(models["qwen3"], param_offload=True), Rank(), horizon=1)
        assert bool(engine.infer(batch, [[0, 1, 2]])["log_probs"].isnan().all())
        with engine.loaded(optimizer=False):
            assert bool(engine.infer(batch, [[0, 1, 2]])["log_probs"].isfinite().all())


def test_what_several_tensors_share_counts_once() -> None:
    x = torch.zeros(10)
    assert bytes_of([x, x[:5], torch.zeros(3, dtype=torch.float64)]) == 40 + 24


def test_the_largest_of_all_ranks() -> None:
    ranks = [DeviceMemory(1, 20, 3, 40), None, DeviceMemory(5, 6, 7, 8)]
    assert DeviceMemory.largest(ranks) == DeviceMemory(5, 20, 7, 40)
    assert DeviceMemory.largest([None]) is None
    assert DeviceMemory.of(torch.device("cpu")) is None
