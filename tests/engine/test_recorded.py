"""What a phase record keeps of tensors: sums that add up over any split, and the whole of what is sharded."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from corral.engine.engine import Engine
from corral.engine.rank import Rank
from corral.engine.recorded import RecordedTensor, added, recorded, sums
from tests.engine.parity import share_of
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, random_batch

MASK = (1 << 64) - 1


def sign(name: str, place: int) -> int:
    """The bit of splitmix64 in plain integers."""
    z = (place + 1 + (zlib.crc32(name.encode()) << 32)) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return 1 - 2 * ((z ^ z >> 31) & 1)


@given(
    values=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    name=st.text(max_size=10),
)
def test_sums_of_any_cut_add_up_to_those_of_the_whole(values, cuts, name):
    tensor = torch.tensor(values, dtype=torch.float64)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [sums(name, tensor[a:b], a) for a, b in itertools.pairwise(edges)]
    assert sum(squares for squares, _ in parts) == pytest.approx(sum(x * x for x in values), abs=1e-12)
    expected = sum(sign(name, place) * x for place, x in enumerate(values))
    assert sum(dot for _, dot in parts) == pytest.approx(expected, abs=1e-9)


def test_a_large_tensor_is_taken_in_blocks():
    tensor = torch.randn(3, 500_001, generator=torch.Generator().manual_seed(1))
    squares, dot = sums("w", tensor, 0)
    assert squares == pytest.approx(float(tensor.double().square().sum()), rel=1e-12)
    halves = [sums("w", part, start) for part, start in ((tensor[:1], 0), (tensor[1:], 500_001))]
    assert dot == pytest.approx(sum(part for _, part in halves), rel=1e-9)


def test_the_dot_sees_what_a_norm_does_not():
    tensor = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, dot = sums("w", tensor, 0)
    for other in (tensor.flip(0), tensor.T.contiguous(), -tensor, tensor.roll(1)):
        squares, elsewhere = sums("w", other, 0)
        assert squares == pytest.approx(float(tensor.square().sum()))
        assert abs(elsewhere - dot) > 1.0
    assert abs(sums("v", tensor, 0)[1] - dot) > 1.0


class Gathers(TorchDispatchMode):
    """Counts the tensors that are gathered from all ranks while it is on."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "_c10d_functional" and "all_gather" in func.name()
        return func(*args, **(kwargs or {}))


Recorded = tuple[dict[str, RecordedTensor], dict[str, RecordedTensor], int]


def all_modes(rank: Rank, folder: Path) -> list[Recorded]:
    """Of an optimizer step in each mode: its gradients, the weights after it, and how many tensors were gathered."""
    plan = engine_plan(folder, "critic", dtype="float64", sp=rank.world)
    engine = Engine(plan, rank, horizon=1)
    batch = random_batch(dtype=torch.float64)
    share, micro, _ = share_of(batch, engine, plan.infer)
    out = []
    for mode in ("none", "summary", "full"):
        with Gathers() as gathers:
            done = engine.train_step(share, micro, objective("critic", batch), record=mode)
            weights = engine.recorded_weights(mode) if mode != "none" else {}
        out.append((done.gradients, weights, gathers.count))
    return out


def assert_same(one: dict[str, RecordedTensor], many: dict[str, RecordedTensor]) -> None:
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        assert many[name].squares == pytest.approx(tensor.squares, rel=1e-9)
        assert many[name].dot == pytest.approx(tensor.dot, abs=1e-9)


@pytest.fixture(scope="module")
def alone_and_split(models: dict[str, Path]):
    """What all_modes says in one process, and on each of two ranks."""
    return all_modes(Rank(), models["qwen3"]), on_ranks(2, all_modes, models["qwen3"])


def test_gradients_and_weights_of_a_split_are_those_of_one_process(alone_and_split):
    alone, ranks = alone_and_split
    for mode, what in ((1, 0), (1, 1), (2, 0), (2, 1)):
        assert_same(alone[mode][what], added([rank[mode][what] for rank in ranks]))
    for what in (0, 1):
        whole = added([rank[2][what] for rank in ranks])
        for name, tensor in alone[2][what].items():
            torch.testing.assert_close(whole[name].whole, tensor.whole, rtol=1e-9, atol=1e-9)
            assert math.sqrt(tensor.squares) == pytest.approx(float(tensor.whole.norm()))
            assert all(rank[2][what][name].whole is None for rank in ranks[1:])


def test_nothing_is_recorded_unless_asked_and_nothing_gathered_for_a_summary(alone_and_split):
    _, ranks = alone_and_split
    for (none, no_weights, quiet), (summary, weights, also_quiet), (_, _, full) in ranks:
        assert (none, no_weights) == ({}, {})
        assert all(tensor.whole is None for tensor in [*summary.values(), *weights.values()])
        assert quiet == also_quiet
        assert full == quiet + len(summary) + len(weights)


def test_gradients_are_those_before_clipping(models: dict[str, Path]):
    plan = engine_plan(models["qwen3"], "critic", dtype="float64")
    engine = Engine(replace(plan, optim=replace(plan.optim, clip_grad=1e-6)), Rank(), horizon=1)
    batch = random_batch(dtype=torch.float64)
    done = engine.train_step(batch, [list(range(len(batch)))], objective("critic", batch), record="full")
    assert math.sqrt(sum(tensor.squares for tensor in done.gradients.values())) == pytest.approx(done.grad_norm)
    assert done.grad_norm > 1e-3


def test_a_tensor_that_every_rank_holds_counts_once():
    buffer = {"scale": torch.arange(4.0)}
    (whole,) = added([recorded(buffer, whole=True, rank=rank) for rank in range(3)]).values()
    assert whole.squares == 14.0
    assert torch.equal(whole.whole, buffer["scale"])
