"""Phase records of one process and of 2 × 4 ranks with sequence parallel 2 are equal, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.parity import parity_overrides
from tests.trainer.runs import Inputs, train

RANKS = "rank/"
SP = 2


@pytest.fixture(scope="module")
def folders(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`phases` of a run of two steps in one process, and of the same on eight ranks."""
    out = []
    for name, split in (("one", False), ("many", True)):
        run_dir = tmp_path_factory.mktemp(name) / "run"
        more = ["trainer.record_phases=full", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
        done = train([*parity_overrides(inputs, run_dir, split=split, dtype="float64"), *more])
        assert done.returncode == 0, done.stderr
        out.append(run_dir / "phases")
    return out[0], out[1]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_tensors_are_equal(folders: tuple[Path, Path], step: int):
    one, many = (load_file(folder / f"step-{step:06d}.safetensors") for folder in folders)
    assert one.keys() == many.keys()
    assert {name.split("/")[0] for name in one} > {"gradients", "weights", "returns", "rollout_log_probs"}
    for name, tensor in one.items():
        assert (many[name].dtype, many[name].shape) == (tensor.dtype, tensor.shape), name
        if not name.startswith(RANKS):
            close(many[name], tensor)
            assert tensor.dtype in (np.float64, np.int64, np.bool_), name


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_optimizer_steps_are_equal_and_the_ranks_parts_add_up(folders: tuple[Path, Path], step: int):
    one, many = (json.loads((folder / f"step-{step:06d}.json").read_text()) for folder in folders)
    assert (one["world"], many["world"]) == (1, 8)
    for alone, split in zip(one["updates"], many["updates"], strict=True):
        same = ("role", "k", "rows", "denominators", "skipped")
        assert [alone[key] for key in same] == [split[key] for key in same]
        close(split["grad_norm"], alone["grad_norm"])
        assert [part["rank"] for part in split["parts"]] == list(range(8))
        for name, value in alone["parts"][0]["stats"].items():
            close(sum(part["stats"][name] for part in split["parts"]), value)
    assert_same_norms(one["weights"], many["weights"])
    for alone, split in zip(one["updates"], many["updates"], strict=True):
        assert_same_norms(alone["gradients"], split["gradients"])


def assert_same_norms(one: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    names = [{key: entry.get(key) for key in ("role", "param")} for entry in one]
    assert names == [{key: entry.get(key) for key in ("role", "param")} for entry in many]
    for key in ("norm", "dot"):
        close([entry[key] for entry in many], [entry[key] for entry in one])


@pytest.mark.slow
def test_every_rank_generates_and_the_first_of_each_sequence_group_scores(folders: tuple[Path, Path]):
    many = load_file(folders[1] / "step-000001.safetensors")
    assert set(many["rank/rollout"].tolist()) == set(range(8))
    for role in ("actor", "ref", "critic"):
        assert set(many[f"rank/{role}"].tolist()) == set(range(0, 8, SP))
