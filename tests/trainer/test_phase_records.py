"""phases/ of a run folder against everything else the run leaves: samples, metrics, exported weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from corral.trainer import ppo
from tests.trainer.recorded import skip_overrides
from tests.trainer.runs import Inputs, error_line, metrics, samples, temporary_files, train_here, weights

FEW = ("reward.num_workers=1",)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")


def phases(run_dir: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """As another program reads them: no code of Corral."""
    place = run_dir / "phases" / f"step-{step:06d}"
    return load_file(place.with_suffix(".safetensors")), json.loads(place.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def full(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of PPO with a reference, everything recorded."""
    run_dir = tmp_path_factory.mktemp("full") / "run"
    more = [
        "trainer.record_phases=full",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ]
    assert train_here(inputs.overrides(run_dir, *FEW, *more)) == 0
    return run_dir


def test_two_whole_files_a_step(full: Path):
    names = sorted(path.name for path in (full / "phases").iterdir())
    assert names == [f"step-00000{step}.{kind}" for step in (1, 2) for kind in ("json", "safetensors")]
    for step in (1, 2):
        _, document = phases(full, step)
        assert {name: document[name] for name in ("version", "step", "mode", "world")} == {
            "version": 1,
            "step": step,
            "mode": "full",
            "world": 1,
        }


def test_samples_are_those_the_run_trained_on(full: Path):
    for step in (1, 2):
        tensors, _ = phases(full, step)
        rows = samples(full, step)
        assert tensors["row"].tolist() == [row["row"] for row in rows]
        assert tensors["sample_index"].tolist() == [row["sample_index"] for row in rows]
        assert tensors["scores"].tolist() == [row["score"] for row in rows]
        for name, lengths in (("prompt_ids", "prompt_lengths"), ("response_ids", "response_lengths")):
            cut = np.split(tensors[name], np.cumsum(tensors[lengths])[:-1])
            assert [part.tolist() for part in cut] == [row[name] for row in rows]
        cut = np.split(tensors["values"], np.cumsum(tensors["response_lengths"])[:-1])
        assert [part.tolist() for part in cut] == [row["values"] for row in rows]


def test_tokens_have_everything_that_was_computed_for_them(full: Path):
    tensors, _ = phases(full, 1)
    count = tensors["response_lengths"].sum()
    fields = ["rewards", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns"]
    assert {tensors[name].shape for name in ["response_mask", *fields]} == {(count,)}
    assert tensors["old_log_probs"].dtype == np.float32
    recorded = metrics(full)[0]
    valid = tensors["response_mask"]
    assert float(tensors["advantages"][valid].max()) == pytest.approx(recorded["critic/advantages/max"])
    assert float(tensors["values"][valid].mean()) == pytest.approx(recorded["critic/values/mean"], rel=1e-5)
    np.testing.assert_allclose(tensors["ref_log_probs"], tensors["old_log_probs"])  # no update yet


def test_one_process_computed_everything(full: Path):
    tensors, _ = phases(full, 2)
    ranks = {name: set(tensor.tolist()) for name, tensor in tensors.items() if name.startswith("rank/")}
    assert ranks == {f"rank/{role}": {0} for role in ("rollout", "actor", "ref", "critic")}


def test_optimizer_steps_are_those_the_metrics_sum_up(full: Path):
    for step, recorded in enumerate(metrics(full), start=1):
        tensors, document = phases(full, step)
        updates = document["updates"]
        assert [(update["role"], update["k"]) for update in updates] == [
            (role, k) for role in ("critic", "actor") for k in (0, 1)
        ]
        assert [update["rows"] for update in updates] == 2 * [tensors["row"][:4].tolist(), tensors["row"][4:].tolist()]
        tokens = [int(part.sum()) for part in np.split(tensors["response_lengths"], [4])]
        assert [update["denominators"] for update in updates] == 2 * [{"tokens": n, "samples": 4} for n in tokens]
        assert not any(update["skipped"] for update in updates)
        for role in ("critic", "actor"):
            own = [update for update in updates if update["role"] == role]
            assert mean(update["grad_norm"] for update in own) == pytest.approx(recorded[f"{role}/grad_norm"])
            loss = [sum(part["stats"]["loss"] for part in update["parts"]) for update in own]
            assert mean(loss) == pytest.approx(recorded[f"{role}/loss"])
            assert [part["rank"] for update in own for part in update["parts"]] == [0, 0]


def mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def test_gradients_make_the_norm_and_their_sums_are_theirs(full: Path):
    tensors, document = phases(full, 1)
    for update in document["updates"]:
        norms = {gradient["param"]: gradient["norm"] for gradient in update["gradients"]}
        assert math.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(update["grad_norm"], rel=1e-5)
        place = f"gradients/{update['role']}/{update['k']}/"
        whole = {name.removeprefix(place): tensor for name, tensor in tensors.items() if name.startswith(place)}
        assert whole.keys() == norms.keys()
        for name, tensor in whole.items():
            assert tensor.dtype == np.float32
            assert float(np.linalg.norm(tensor.astype(np.float64))) == pytest.approx(norms[name])


def test_weights_are_those_that_are_exported(full: Path):
    tensors, document = phases(full, 2)
    norms = {(weight["role"], weight["param"]): weight["norm"] for weight in document["weights"]}
    for role in ("actor", "critic"):
        for name, exported in weights(full, 2, role).items():
            recorded = tensors[f"weights/{role}/{name}"]
            assert np.array_equal(recorded, exported.numpy())
            assert norms[role, name] == pytest.approx(float(exported.double().norm()))


def test_a_summary_has_all_but_the_tensors(full: Path, inputs: Inputs, tmp_path: Path):
    run_dir = tmp_path / "run"
    more = ["trainer.record_phases=summary", "actor_rollout_ref.actor.use_kl_loss=True"]
    assert train_here(inputs.overrides(run_dir, *FEW, *more)) == 0
    (tensors, document), (whole, other) = phases(run_dir, 1), phases(full, 1)
    assert document == {**other, "mode": "summary"}
    kept = {name for name in whole if not name.startswith(("gradients/", "weights/"))}
    assert tensors.keys() == kept
    assert all(np.array_equal(tensors[name], whole[name]) for name in kept)


def test_recording_changes_nothing_and_none_leaves_nothing(full: Path, inputs: Inputs, tmp_path: Path):
    run_dir = tmp_path / "run"
    more = ["trainer.save_freq=1", "actor_rollout_ref.actor.use_kl_loss=True"]
    assert train_here(inputs.overrides(run_dir, *FEW, *more)) == 0
    assert not (run_dir / "phases").exists()
    tensors, _ = phases(full, 1)
    for role in ("actor", "critic"):
        exported = weights(run_dir, 1, role)
        assert all(
            np.array_equal(tensors[f"weights/{role}/{name}"], tensor.numpy()) for name, tensor in exported.items()
        )


def test_without_a_critic_and_with_generations_until_groups_vary(inputs: Inputs, tmp_path: Path):
    run_dir = tmp_path / "run"
    more = ["trainer.record_phases=summary", *GRPO, "algorithm.filter_groups.enable=True"]
    assert train_here(inputs.overrides(run_dir, *FEW, *more, "algorithm.filter_groups.metric=score")) == 0
    tensors, document = phases(run_dir, 1)
    assert {"values", "ref_log_probs"}.isdisjoint(tensors)
    assert tensors["rank/rollout"].tolist() == [0] * 16
    assert tensors["rank/critic"].tolist() == tensors["rank/ref"].tolist() == [-1] * 16
    assert {update["role"] for update in document["updates"]} == {"actor"}
    assert {weight["role"] for weight in document["weights"]} == {"actor"}


def test_nobody_computed_what_was_replayed_or_taken_from_the_engine(inputs: Inputs, tmp_path: Path):
    more = [*GRPO, *FEW, *skip_overrides(tmp_path / "dumps", 1), "trainer.record_phases=summary"]
    more += ["algorithm.rollout_correction.bypass_mode=True"]
    for name in ("made", "replayed"):
        assert train_here(inputs.overrides(tmp_path / name, *more)) == 0
    (made, one), (replayed, other) = phases(tmp_path / "made", 1), phases(tmp_path / "replayed", 1)
    assert set(made["rank/actor"]) == {-1}
    assert set(made.pop("rank/rollout")) == {0}
    assert set(replayed.pop("rank/rollout")) == {-1}
    assert one == other
    assert all(np.array_equal(made[name], replayed[name]) for name in made)


def test_a_disk_that_refuses(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run_dir = tmp_path / "run"
    original = ppo.record_phases

    def in_the_way(*args: Any) -> None:
        (run_dir / "phases").write_text("a file")
        original(*args)

    monkeypatch.setattr(ppo, "record_phases", in_the_way)
    assert train_here(inputs.overrides(run_dir, *GRPO, *FEW, "trainer.record_phases=full")) == 75
    assert f"cannot write {run_dir}/phases/step-000001.safetensors" in error_line(capsys.readouterr().err)
    assert temporary_files(run_dir) == []


@pytest.mark.parametrize("mode", ["all", "Full"])
def test_another_mode_is_refused(refused, mode: str):
    assert "none, summary, full" in refused(78, f"trainer.record_phases={mode}")
