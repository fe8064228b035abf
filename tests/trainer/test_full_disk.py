"""A disk that is full, wherever a run writes: one line, exit code 75, and nothing half-written."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.engine.engine import Engine
from corral.rollout.replay import Replay
from corral.trainer.checkpoints import Checkpoints
from corral.trainer.records import Records
from tests.trainer.runs import Inputs, metrics, temporary_files, train_here


@pytest.fixture
def run_and_fill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inputs: Inputs, tmp_path: Path
) -> Callable[..., str]:
    """Runs one step in which the disk is full from one call on, to the very end; the one line that reports it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run(owner: type, method: str, size: int, *more: str) -> str:
        """size: bytes that a file may still have."""
        original: Callable[..., object] = getattr(owner, method)

        def on_a_full_disk(*args: object, **named: object) -> object:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            return original(*args, **named)

        monkeypatch.setattr(owner, method, on_a_full_disk)
        try:
            code = train_here(inputs.overrides(tmp_path / "run", "reward.num_workers=1", *more))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == 75
        lines = capsys.readouterr().err.splitlines()
        (line,) = [line for line in lines if line.startswith("error:")]
        assert temporary_files(tmp_path) == []
        return line

    return run


@pytest.mark.parametrize("size", [0, 2000])
def test_while_dumping_a_rollout(run_and_fill, tmp_path: Path, size: int):
    dumps = tmp_path / "dumps"
    line = run_and_fill(
        Replay, "store", size, "skip.rollout.enable=True", "skip.rollout.steps=[1]", f"skip.rollout.dump_dir={dumps}"
    )
    assert f"cannot write the rollout dump {dumps}/" in line
    assert "File too large" in line
    assert [path for path in dumps.rglob("*") if path.is_file()] == []
    assert metrics(tmp_path / "run") == []


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_while_saving_the_model(run_and_fill, tmp_path: Path, size: int):
    line = run_and_fill(Engine, "save", size, "trainer.save_freq=1")
    assert f"cannot write the model to {tmp_path}/run/global_step_1/actor/huggingface" in line
    assert list((tmp_path / "run" / "global_step_1").rglob("*.*")) == []


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_while_saving_a_checkpoint(run_and_fill, tmp_path: Path, size: int):
    whole = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"
    line = run_and_fill(Engine, "save_checkpoint", size, "trainer.save_freq=1", whole)
    assert f"cannot write {tmp_path}/run/global_step_1/actor/model.safetensors: File too large" in line
    assert list((tmp_path / "run").glob("*step*")) == []


def test_while_saving_what_the_driver_holds(run_and_fill, tmp_path: Path):
    line = run_and_fill(Checkpoints, "_state", 0, "trainer.save_freq=1")
    assert f"cannot write {tmp_path}/run/global_step_1/trainer.json: File too large" in line
    assert list((tmp_path / "run").glob("*step*")) == []


@pytest.mark.parametrize(
    ("method", "file"), [("plan", "plan.json"), ("samples", "samples/1.jsonl"), ("trace", "trace.json")]
)
def test_while_writing_records(run_and_fill, tmp_path: Path, method: str, file: str):
    assert f"cannot write {tmp_path}/run/{file}: File too large" in run_and_fill(Records, method, 500)
    assert not (tmp_path / "run" / file).exists()


@pytest.mark.parametrize("size", [0, 500])
def test_while_appending_metrics(run_and_fill, tmp_path: Path, size: int):
    assert f"cannot write {tmp_path}/run/metrics.jsonl: File too large" in run_and_fill(Records, "metrics", size)
    assert metrics(tmp_path / "run") == []
