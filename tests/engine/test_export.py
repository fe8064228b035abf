"""Weights out of an engine: whole, in order, once; and a folder that transformers loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.engine.engine import Engine
from corral.engine.rank import Rank
from corral.errors import InfraError
from tests.engine.parity import share_of
from tests.engine.ranks import on_ranks
from tests.engine.small import eager_log_probs, engine_plan, objective, random_batch


def trained(rank: Rank, folder: Path, out: Path) -> dict[str, Tensor]:
    """One step, saved twice at the same place; the weights it streams."""
    engine = Engine(engine_plan(folder, sp=rank.world), rank, horizon=1)
    batch = random_batch()
    share, micro, _ = share_of(batch, engine, engine.plan.infer)
    engine.save(out)
    engine.train_step(share, micro, objective("actor", batch))
    engine.save(out)
    return {name: weight.clone() for name, weight in engine.full_weights()}


@pytest.mark.parametrize("world", [1, 2])
def test_a_saved_folder_is_the_trained_model(world: int, models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["qwen3-tied"]
    (folder / "tokenizer_config.json").write_text('{"added": 1}')
    out = tmp_path / "deep" / "saved"
    ranks = [trained(Rank(), folder, out)] if world == 1 else on_ranks(2, trained, folder, out)
    weights = ranks[0]
    assert all(torch.equal(weights[name], rank[name]) for rank in ranks for name in weights)
    reloaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert [name for name, _ in reloaded.named_parameters()] == list(weights)
    assert all(torch.equal(p, weights[name]) for name, p in reloaded.named_parameters())
    original = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(not torch.equal(weights[name], original[name]) for name in weights)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"added": 1}
    assert [entry.name for entry in out.parent.iterdir()] == ["saved"]  # nothing half-written beside it


def test_a_saved_folder_scores_as_the_engine_does(models: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine(engine_plan(models["llama"]), Rank(), horizon=1)
    batch = random_batch()
    micro = [list(range(len(batch)))]
    engine.train_step(batch, micro, objective("actor", batch))
    engine.save(tmp_path / "saved")
    log_probs, _ = eager_log_probs(tmp_path / "saved", batch, 1.0, torch.float32)
    assert torch.allclose(engine.infer(batch, micro)["log_probs"], log_probs, rtol=0, atol=1e-5)


def test_a_critic_trains_on_from_where_it_was_saved(models: dict[str, Path], tmp_path: Path) -> None:
    """The value head comes back from the folder instead of being drawn anew."""
    first = Engine(engine_plan(models["qwen3"], "critic", seed=1), Rank(), horizon=1)
    first.save(tmp_path / "critic")
    again = Engine(engine_plan(tmp_path / "critic", "critic", seed=2), Rank(), horizon=1)
    assert torch.equal(first.module.score.weight, again.module.score.weight)


def test_a_failed_save_leaves_the_old_folder(models: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    engine.save(tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    broken = engine_plan(models["qwen3"]).model
    object.__setattr__(broken, "tokenizer_path", str(tmp_path / "gone"))
    object.__setattr__(engine.plan, "model", broken)
    with pytest.raises(InfraError, match=r"No such file or directory: .*gone"):
        engine.save(tmp_path / "saved")
    assert {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_an_interrupt_between_the_renames_leaves_the_old_folder(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    engine.save(tmp_path / "saved")
    (tmp_path / "saved" / "mark").touch()
    rename, targets = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        targets.append(target)
        if len(targets) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "mark").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
