"""A run that stops and goes on does what one that never stopped does: metrics, weights and Adam's state, bit by bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.data.arithmetic import write_arithmetic
from corral.engine.tiny import write_tiny_model
from tests.trainer.checkpoints import ACTOR, STEPS, assert_same_checkpoint, from_path, measured, resumable, state
from tests.trainer.runs import Inputs, error_line, metrics, temporary_files, train_here, weights


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A model of two small layers: most of the time would go into writing checkpoints to disk."""
    folder = tmp_path_factory.mktemp("small")
    write_tiny_model(folder / "model", mean_length=12, hidden_size=32, layers=2, heads=2, kv_heads=1)
    write_arithmetic(folder / "data", seed=0, train=64, test=8)
    return Inputs(model=folder / "model", data=folder / "data")


@pytest.fixture(scope="module")
def straight(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without a stop, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train_here(resumable(inputs, folder)) == 0
    return folder


@pytest.fixture
def stopped(straight: Path, tmp_path: Path) -> Path:
    """The folder of a run that ended after its second step."""
    folder = tmp_path / "stopped"
    folder.mkdir()
    for step in (1, 2):
        shutil.copytree(straight / f"global_step_{step}", folder / f"global_step_{step}")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder


def test_the_run_moves_what_has_to_be_kept(straight: Path):
    lines = metrics(straight)
    for role in ("actor", "critic"):  # warm-up, then half a cosine
        assert [line[f"{role}/lr"] for line in lines] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    assert len({state(straight, step)["kl_coefficient"] for step in range(1, STEPS + 1)}) == STEPS
    assert [line["training/epoch"] for line in lines] == [0, 0, 1, 1]
    assert all(line["actor/grad_norm"] > 1e-3 for line in lines)


@pytest.mark.parametrize("step", range(1, STEPS))  # in an epoch, between two, and before the last step
def test_going_on_is_as_if_it_had_never_stopped(inputs: Inputs, straight: Path, tmp_path: Path, step: int):
    on = tmp_path / "on"
    assert train_here(resumable(inputs, on, *from_path(straight / f"global_step_{step}"))) == 0
    expected = {number: line for number, line in measured(straight).items() if number > step}
    assert measured(on) == expected
    for number in range(step + 1, STEPS + 1):
        assert_same_checkpoint(straight, on, number)


def test_auto_goes_on_from_the_newest_and_the_plan_says_so(
    inputs: Inputs, straight: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
):
    assert train_here(resumable(inputs, stopped)) == 0
    assert f"resuming from global_step_2 in {stopped}" in capsys.readouterr().out
    assert list(measured(stopped)) == [3, 4]
    assert_same_checkpoint(straight, stopped, STEPS)
    assert (stopped / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert json.loads((stopped / "keys.json").read_text())["trainer.resume_mode"]["by"] == ["corral.trainer.run"]


@pytest.mark.slow
def test_disable_starts_from_the_model(inputs: Inputs, straight: Path, stopped: Path):
    assert train_here(resumable(inputs, stopped, "trainer.resume_mode=disable")) == 0
    assert measured(stopped) == measured(straight)


@pytest.mark.parametrize("steps", [STEPS, STEPS - 1])
def test_at_the_end_and_beyond_nothing_is_done_or_written(
    inputs: Inputs, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
):
    folder = tmp_path / "done"
    shutil.copytree(straight, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with caplog.at_level("INFO"):
        assert train_here(resumable(inputs, folder, f"trainer.total_training_steps={steps}")) == 0
    assert f"global_step_4 is at step 4 of {steps}: nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_training_longer_says_that_the_schedule_changes(
    inputs: Inputs, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    more = ["trainer.total_training_steps=5", *from_path(straight / "global_step_4")]
    assert train_here(resumable(inputs, tmp_path / "on", *more)) == 0
    assert list(measured(tmp_path / "on")) == [5]
    assert "ended at step 4 when global_step_4 was saved and ends at step 5 now" in caplog.text


def test_validation_alone_scores_the_checkpoint(inputs: Inputs, straight: Path, tmp_path: Path):
    more = ["trainer.val_only=True", f"data.val_files={inputs.data}/test.parquet"]
    assert train_here(resumable(inputs, tmp_path / "on", *more, *from_path(straight / "global_step_4"))) == 0
    assert [line["step"] for line in metrics(tmp_path / "on")] == [STEPS]


def test_skipped_iterations_are_counted_across_a_stop(
    inputs: Inputs, stopped: Path, capsys: pytest.CaptureFixture[str]
):
    file = stopped / "global_step_2" / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "non_finite": 2}))
    # A gradient that overflows: the third iteration in a row is the first one after the stop.
    assert train_here(resumable(inputs, stopped, f"{ACTOR}.entropy_coeff=1e308")) == 1
    assert "in 3 iterations in a row, the last is step 3" in error_line(capsys.readouterr().err)


# What is on disk -----------------------------------------------------------------------------------------------------


def folders(run_dir: Path) -> dict[str, set[str]]:
    return {
        folder.name: {part.name for part in folder.iterdir()} - {"trainer.json"}
        for folder in run_dir.glob("global_step_*")
    }


def test_old_parts_are_removed_also_those_of_an_earlier_process(inputs: Inputs, stopped: Path):
    """A step of another branch, beyond the present one, is left alone."""
    shutil.copytree(stopped / "global_step_2", stopped / "global_step_9")
    keep = ["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=2"]
    assert train_here(resumable(inputs, stopped, *keep)) == 0
    both = {"actor", "critic"}
    assert folders(stopped) == {"global_step_3": {"critic"}, "global_step_4": both, "global_step_9": both}
    assert temporary_files(stopped) == []


def test_what_a_run_would_go_on_from_is_never_removed(inputs: Inputs, stopped: Path):
    keep = ["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1"]
    assert train_here(resumable(inputs, stopped, f"{ACTOR}.checkpoint.save_contents=[hf_model]", *keep)) == 0
    both = {"actor", "critic"}
    assert folders(stopped) == {"global_step_2": both, "global_step_4": both}
    assert (stopped / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize("contents", ["hf_model", "model,hf_model", "optimizer", "extra"])
def test_a_checkpoint_that_nothing_can_go_on_from_is_not_picked_up(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: str
):
    run = tmp_path / "run"
    more = [f"{ACTOR}.checkpoint.save_contents=[{contents}]", "trainer.total_training_steps=1"]
    assert train_here(resumable(inputs, run, *more)) == 0
    if "hf_model" in contents:
        assert weights(run, 1, "critic")
    assert not (run / "latest_checkpointed_iteration.txt").exists()
    assert train_here(resumable(inputs, tmp_path / "on", *from_path(run / "global_step_1"))) == 1
    line = error_line(capsys.readouterr().err)
    assert f"holds {contents.replace(',', ', ')}: a run goes on only from model, optimizer, extra" in line
    assert not (tmp_path / "on").exists()


KILLED = """
import os, signal, sys
from corral import atomic
from corral.engine import checkpoint
from corral.exits import run_command
from corral.trainer.main_ppo import main

write, calls = {name}, 0

def killed(path, *args):
    global calls
    calls += "{match}" in str(path)
    if calls == 2:
        if path.name == "model.safetensors":
            path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, *args)

{name} = killed
run_command(lambda: main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("name", "match", "left"),
    [
        ("checkpoint.write_tensors", "critic/model", {"global_step_1"}),
        pytest.param("atomic.os.rename", "global_step", {"global_step_1"}, marks=pytest.mark.slow),
        pytest.param("atomic.write_text", "latest", {"global_step_1", "global_step_2"}, marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle_of_the_second_save_leaves_the_first(
    inputs: Inputs, straight: Path, tmp_path: Path, name: str, match: str, left: set[str]
):
    run = tmp_path / "run"
    code = KILLED.format(name=name, match=match)
    done = subprocess.run(
        [sys.executable, "-c", code, *resumable(inputs, run)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert set(folders(run)) == left
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert train_here(resumable(inputs, run)) == 0
    assert list(measured(run)) == [2, 3, 4]
    assert_same_checkpoint(straight, run, STEPS)
    assert temporary_files(run) == []


# What cannot be gone on from -----------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "latest_checkpointed_iteration.txt").write_text("two"), "hold the number of a step"),
        (lambda run: (run / "latest_checkpointed_iteration.txt").write_text("7"), "global_step_7 is no checkpoint"),
        (lambda run: (run / "global_step_2" / "trainer.json").unlink(), "global_step_2 is no checkpoint"),
        (lambda run: cut(run / "global_step_2" / "trainer.json"), "trainer.json is damaged"),
        (lambda run: (run / "global_step_2" / "trainer.json").write_text("[]"), "not that of a checkpoint"),
        (lambda run: rewrite(run / "global_step_2" / "trainer.json", format=9), "format 9"),
        (lambda run: rewrite(run / "global_step_2" / "trainer.json", loader={}), "not that of a checkpoint"),
        (lambda run: shutil.rmtree(run / "global_step_2" / "critic"), "has no critic"),
    ],
)
def test_damage_is_one_line_before_anything_starts(
    inputs: Inputs, stopped: Path, capsys: pytest.CaptureFixture[str], damage, said: str
):
    damage(stopped)
    assert train_here(resumable(inputs, stopped)) == 1
    line = error_line(capsys.readouterr().err)
    assert said in line
    assert not (stopped / "plan.json").exists()


@pytest.mark.parametrize("part", ["actor/model.safetensors", "critic/optimizer.safetensors", "actor/extra.json"])
def test_a_damaged_part_is_one_line(inputs: Inputs, stopped: Path, capsys: pytest.CaptureFixture[str], part: str):
    cut(stopped / "global_step_2" / part)
    assert train_here(resumable(inputs, stopped)) == 1
    assert f"global_step_2/{part} is " in error_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("data.train_batch_size=4", 1, "batch_size was 8 when saved and is 4 now"),
        ("data.seed=7", 1, "seed was 42 when saved and is 7 now"),
        ("data.train_max_samples=16", 1, "rows was 17 when saved and is 16 now"),
        ("data.train_files={data}/test.parquet", 1, r"data\.train_files were others"),
        ("algorithm.adv_estimator=reinforce_plus_plus", 78, r"was saved with actor and critic .* trains actor"),
        ("critic.fsdp.model_dtype=float32 critic.fsdp.dtype=float32", 1, r"is F64 .*, this run's model has F32"),
    ],
)
def test_another_run_is_named_in_one_line(
    inputs: Inputs, stopped: Path, capsys: pytest.CaptureFixture[str], key: str, code: int, said: str
):
    assert train_here(resumable(inputs, stopped, *key.format(data=inputs.data).split())) == code
    assert re.search(said, error_line(capsys.readouterr().err))


def test_another_model_is_named_in_one_line(
    inputs: Inputs, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_tiny_model(tmp_path / "model", hidden_size=32, layers=1, heads=2, kv_heads=1)
    assert train_here(resumable(inputs, stopped, f"actor_rollout_ref.model.path={tmp_path}/model")) == 1
    assert "is of another model: model.layers.1." in error_line(capsys.readouterr().err)
