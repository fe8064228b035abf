"""A model goes on from a checkpoint as if nothing had happened, in whatever world it was written and is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.engine.engine import Engine
from corral.engine.export import full_tensor
from corral.engine.rank import Rank
from corral.engine.tensor_file import write_tensors
from corral.errors import DataError
from tests.engine.parity import share_of, total
from tests.engine.ranks import on_ranks
from tests.engine.small import engine_plan, objective, optimizer, random_batch

HORIZON = 4
PARTS = ("model", "optimizer", "extra")
SCHEDULE = optimizer(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2)


@dataclass(frozen=True)
class State:
    """All that training depends on, whole."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    rates: list[float]
    stats: list[dict[str, float]]


def engine_on(rank: Rank, folder: Path, role: str, sp: int) -> Engine:
    plan = engine_plan(folder, role, dtype="float64", sp=sp, dp=rank.world // sp, optim=SCHEDULE)
    return Engine(plan, rank, horizon=HORIZON)


def steps(engine: Engine, numbers: range) -> tuple[list[float], list[dict[str, float]]]:
    """One optimizer step an iteration, on a batch of its own: learning rates and statistics over all ranks."""
    rates, stats = [], []
    for number in numbers:
        batch = random_batch(seed=number, dtype=torch.float64)
        share, micro, _ = share_of(batch, engine, engine.plan.infer)
        rates.append(engine.lr)
        done = engine.train_step(share, micro, objective(engine.plan.role, batch))
        stats.append(total(done.stats, engine.parallel.world))
        engine.end_iteration()
    return rates, stats


def state(engine: Engine, rates: list[float], stats: list[dict[str, float]]) -> State:
    moments = {}
    for name, parameter in engine.module.named_parameters():
        for kind, value in engine.optimizer.state[parameter].items():
            moments[f"{kind}/{name}"] = full_tensor(value).clone()
    return State({name: weight.clone() for name, weight in engine.full_weights()}, moments, rates, stats)


def straight(rank: Rank, folder: Path, role: str, sp: int, out: Path) -> State:
    """All steps, with a checkpoint in the middle."""
    engine = engine_on(rank, folder, role, sp)
    steps(engine, range(2))
    engine.save_checkpoint(out, PARTS)
    return state(engine, *steps(engine, range(2, HORIZON)))


def resumed(rank: Rank, folder: Path, role: str, sp: int, out: Path) -> State:
    """The second half, in an engine that has just been built."""
    engine = engine_on(rank, folder, role, sp)
    engine.load_checkpoint(out)
    return state(engine, *steps(engine, range(2, HORIZON)))


def loaded(rank: Rank, folder: Path, role: str, sp: int, out: Path) -> State:
    engine = engine_on(rank, folder, role, sp)
    engine.load_checkpoint(out)
    return state(engine, [], [])


def assert_equal(one: State, other: State, atol: float = 0.0) -> None:
    assert one.rates == other.rates
    for a, b in ((one.weights, other.weights), (one.moments, other.moments)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name], b[name].to(a[name].dtype), rtol=0, atol=atol), name
    for ours, theirs in zip(one.stats, other.stats, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=atol)


@pytest.mark.parametrize(("architecture", "role"), [("qwen3-tied", "actor"), ("llama", "critic")])
def test_four_steps_are_two_and_two(models: dict[str, Path], tmp_path: Path, architecture: str, role: str) -> None:
    whole = straight(Rank(), models[architecture], role, 1, tmp_path)
    assert_equal(whole, resumed(Rank(), models[architecture], role, 1, tmp_path))
    assert all(float(value) == HORIZON for name, value in whole.moments.items() if name.startswith("step/"))
    assert whole.rates[0] != whole.rates[1]
    untrained = loaded(Rank(), models[architecture], role, 1, tmp_path)
    assert any(not torch.equal(whole.weights[name], weight) for name, weight in untrained.weights.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 1), (4, 2)), ((4, 2), (1, 1)), pytest.param((4, 1), (3, 1), marks=pytest.mark.slow)],
)
def test_a_critic_goes_on_in_another_world(
    models: dict[str, Path], tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """(world, SP). Most tensors do not split evenly, and the value head has fewer rows than there are ranks."""

    def run(at: tuple[int, int], function) -> list[State]:
        args = (models["qwen3"], "critic", at[1], tmp_path)
        return [function(Rank(), *args)] if at[0] == 1 else on_ranks(at[0], function, *args)

    whole = run(before, straight)[0]
    middle = loaded(Rank(), models["qwen3"], "critic", 1, tmp_path)
    for rank in run(after, loaded):
        assert_equal(middle, rank)  # what was read is what was written, bit by bit
    for rank in run(after, resumed):
        assert_equal(whole, rank, atol=1e-9)


def test_an_actor_that_was_not_updated_yet_has_no_moments(models: dict[str, Path], tmp_path: Path) -> None:
    """As in critic warm-up: Adam then starts at the update that comes first."""
    engine_on(Rank(), models["llama"], "actor", 1).save_checkpoint(tmp_path, PARTS)
    engine = engine_on(Rank(), models["llama"], "actor", 1)
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer is not None
    assert len(engine.optimizer.state) == 0
    fresh = engine_on(Rank(), models["llama"], "actor", 1)
    assert_equal(state(engine, *steps(engine, range(2))), state(fresh, *steps(fresh, range(2))))


def test_the_files_are_plain_safetensors_and_json(models: dict[str, Path], tmp_path: Path) -> None:
    whole = straight(Rank(), models["qwen3"], "actor", 1, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "extra.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    assert json.loads((tmp_path / "extra.json").read_text()) == {"iteration": 2}
    weights, moments = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "optimizer.safetensors")
    assert weights.keys() == whole.weights.keys()
    assert moments.keys() == whole.moments.keys()
    assert {value.dtype for value in weights.values()} == {torch.float64}


@pytest.mark.parametrize("contents", [("model",), ("optimizer", "hf_model"), ("extra",), (*PARTS, "hf_model")])
def test_a_save_holds_what_is_asked_for(models: dict[str, Path], tmp_path: Path, contents: tuple[str, ...]) -> None:
    names = {
        "model": "model.safetensors",
        "optimizer": "optimizer.safetensors",
        "extra": "extra.json",
        "hf_model": "huggingface",
    }
    engine_on(Rank(), models["llama"], "actor", 1).save_checkpoint(tmp_path, contents)
    assert {file.name for file in tmp_path.iterdir()} == {names[part] for part in contents}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def header_only(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def other_name(file: Path) -> None:
    tensors = load_file(file)
    tensors["another"] = tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)


def other_shape(file: Path) -> None:
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if tensors[name].dim())
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)


def other_type(file: Path) -> None:
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    "damage", [Path.unlink, cut, header_only, Path.write_text, other_name, other_shape, other_type]
)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_or_foreign_file_is_one_line(models: dict[str, Path], tmp_path: Path, name: str, damage) -> None:
    straight(Rank(), models["qwen3"], "actor", 1, tmp_path)
    file = tmp_path / name
    damage(file, "text") if damage is Path.write_text else damage(file)
    with pytest.raises(DataError) as caught:
        engine_on(Rank(), models["qwen3"], "actor", 1).load_checkpoint(tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"iteration": "x"}'])
def test_a_damaged_position_is_one_line(models: dict[str, Path], tmp_path: Path, text: str | None) -> None:
    engine_on(Rank(), models["qwen3"], "actor", 1).save_checkpoint(tmp_path, PARTS)
    (tmp_path / "extra.json").unlink() if text is None else (tmp_path / "extra.json").write_text(text)
    with pytest.raises(DataError, match=r"extra\.json is missing or damaged"):
        engine_on(Rank(), models["qwen3"], "actor", 1).load_checkpoint(tmp_path)


def test_every_type_and_shape_is_read_back_by_the_library(tmp_path: Path) -> None:
    types = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in types
        for shape in ((), (0, 3), (5,), (3, 2))
    }
    tensors["a column of a larger one"] = torch.arange(12.0).view(3, 4)[:, 1]
    write_tensors(tmp_path / "file.safetensors", tensors, iter(tensors.values()))
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor), name
            assert file.get_tensor(name).dtype == tensor.dtype
