"""skip.rollout in a whole run: recorded, replayed without an engine, and never used for another model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.trainer.recorded import skip_overrides
from tests.trainer.runs import Inputs, metrics, samples, train_here

QUICK = ["reward.num_workers=1", "trainer.total_training_steps=2"]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def skip_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("skip.rollout:")]


def engine_started(run_dir: Path) -> bool:
    return "start_rollout" in (run_dir / "trace.json").read_text()


def test_a_second_run_takes_its_rollouts_from_the_first(
    inputs: Inputs, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    skip = skip_overrides(tmp_path / "dumps", 1, 2)
    first, second = tmp_path / "first", tmp_path / "second"
    assert train_here(inputs.overrides(first, *QUICK, *skip)) == 0
    assert [("nothing recorded" in line, " recorded in " in line) for line in skip_lines(caplog)] == [
        (True, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip
    caplog.clear()
    assert train_here(inputs.overrides(second, *QUICK, *skip)) == 0
    assert len([line for line in skip_lines(caplog) if "replayed from" in line]) == 2
    assert engine_started(first)
    assert not engine_started(second)
    for step, (before, after) in enumerate(zip(metrics(first), metrics(second), strict=True), start=1):
        assert (before["rollout/replayed"], after["rollout/replayed"]) == (0, 1)
        assert samples(first, step) == samples(second, step)
        same = {name for name in before if name.startswith(("actor/", "critic/", "response")) and "perf" not in name}
        assert {name: after[name] for name in same} == pytest.approx({name: before[name] for name in same}, rel=1e-5)


def test_the_dump_of_another_model_is_reported_once_and_generated_anew(
    inputs: Inputs, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    skip = skip_overrides(tmp_path / "dumps", 1)
    assert train_here(inputs.overrides(tmp_path / "first", *QUICK, *skip)) == 0
    other = Path(shutil.copytree(inputs.model, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"].mul_(1.5)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with_other = [f"actor_rollout_ref.model.path={other}", *skip]
    caplog.clear()
    assert train_here(inputs.overrides(tmp_path / "second", *QUICK, *with_other)) == 0
    refused, recorded = skip_lines(caplog)
    assert "is not used: model is another" in refused
    assert refused.endswith("generating step 1 anew")
    assert "step 1 recorded in" in recorded
    assert metrics(tmp_path / "second")[0]["rollout/replayed"] == 0
    caplog.clear()
    assert train_here(inputs.overrides(tmp_path / "third", *QUICK, *with_other)) == 0
    assert metrics(tmp_path / "third")[0]["rollout/replayed"] == 1
    assert samples(tmp_path / "third", 1) == samples(tmp_path / "second", 1)


def test_repeat_trains_every_step_on_the_one_recording(inputs: Inputs, tmp_path: Path):
    assert train_here(inputs.overrides(tmp_path / "first", *QUICK, *skip_overrides(tmp_path / "dumps", 1))) == 0
    repeat = [*skip_overrides(tmp_path / "dumps", 1, 2), "skip.rollout.action=repeat"]
    run_dir = tmp_path / "second"
    assert train_here(inputs.overrides(run_dir, *QUICK, *repeat)) == 0
    assert [step["rollout/replayed"] for step in metrics(run_dir)] == [1, 1]
    for name in ("row", "response_ids", "score"):
        assert [row[name] for row in samples(run_dir, 1)] == [row[name] for row in samples(run_dir, 2)]


def test_a_torn_dump_is_generated_anew(inputs: Inputs, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    skip = skip_overrides(tmp_path / "dumps", 1)
    assert train_here(inputs.overrides(tmp_path / "first", *QUICK, *skip)) == 0
    (tensors,) = (tmp_path / "dumps").rglob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-8])
    caplog.clear()
    assert train_here(inputs.overrides(tmp_path / "second", *QUICK, *skip)) == 0
    assert "is torn" in skip_lines(caplog)[0]
    assert metrics(tmp_path / "second")[0]["rollout/replayed"] == 0
    json.loads((tensors.parent / "meta.json").read_text())


def test_rewards_of_a_replay_are_computed_anew(inputs: Inputs, tmp_path: Path):
    skip = skip_overrides(tmp_path / "dumps", 1)
    assert train_here(inputs.overrides(tmp_path / "first", *QUICK, *skip)) == 0
    file = tmp_path / "three.py"
    file.write_text("def compute_score(**_):\n    return 3\n")
    other = f"reward.custom_reward_function.path={file}"
    assert train_here(inputs.overrides(tmp_path / "second", *QUICK, *skip, other)) == 0
    first = metrics(tmp_path / "second")[0]
    assert (first["rollout/replayed"], first["critic/score/mean"]) == (1, 3)
