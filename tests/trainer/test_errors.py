"""Mistakes as a user meets them: an exit code, one line that starts with `error:`, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from corral.data.arithmetic import arithmetic_rows
from corral.workers.local_cluster import LocalCluster
from tests.trainer.runs import Inputs, assert_whole, error_line, metrics, samples, train, train_here

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def rows(count: int = 8) -> list[dict[str, Any]]:
    return [dict(row) for row in arithmetic_rows(seed=3, train=count, test=1)["train"]]


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.nnode=1"], "'trainer.nnodes'"),
        (["+trainer.nnode=1"], "'trainer.nnodes'"),
        (["++actor_rollout_ref.rollout.engine_kwarg.vllm.x=1"], "engine_kwargs"),
        ([f"{ACTOR}.ppo_mini_batch_size=3"], "data.train_batch_size=8 is not a multiple of"),
        (["critic.ppo_mini_batch_size=5"], "critic.ppo_mini_batch_size=5"),
        (["trainer.n_gpus_per_node=3", f"{ACTOR}.ulysses_sequence_parallel_size=3"], "4 attention heads"),
        (["trainer.n_gpus_per_node=3", "critic.ulysses_sequence_parallel_size=3"], "4 attention heads"),
        (["skip.rollout.steps=1"], "'skip.rollout.steps=[1]'"),
        (["trainer.experiment_name=a=b"], "a=b"),
        (["trainer.experiment_name=a(b"], "a(b"),
        (["trainer.logger=console,file"], "'trainer.logger=[console,file]'"),
        (["skip.rollout.action=dance"], "skip.rollout.action=dance"),
        (["skip.rollout.enable=True", "skip.rollout.steps=[2]"], "skip.rollout.steps=[2]: the run ends at step 1"),
        (["reward.custom_reward_function.path=/nowhere/mine.py"], "/nowhere/mine.py"),
        (["actor_rollout_ref.model.path=/nowhere/model"], "/nowhere/model"),
        (["critic.model.path=/nowhere/model"], "/nowhere/model"),
    ],
)
def test_a_configuration_that_cannot_run(refused, arguments: list[str], said: str):
    assert said in refused(78, *arguments)


def test_an_unknown_place_for_the_output_of_ranks(refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CORRAL_RANK_OUTPUT", "file")
    assert "CORRAL_RANK_OUTPUT='file' is unknown" in refused(78)


def test_skip_steps_beyond_the_data(refused):
    line = refused(
        78,
        "skip.rollout.enable=True",
        "skip.rollout.steps=[40]",
        "trainer.total_training_steps=50",
        "trainer.total_epochs=1",
    )
    assert "[40], but the run ends at step 8" in line


# Model folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_model(inputs: Inputs, tmp_path: Path) -> Path:
    """A copy of the model folder, to be broken."""
    return Path(shutil.copytree(inputs.model, tmp_path / "broken"))


def test_a_broken_config_of_the_model(refused, broken_model: Path):
    (broken_model / "config.json").write_text('{"model_type": ')
    assert f"{broken_model}/config.json" in refused(1, f"actor_rollout_ref.model.path={broken_model}")


def test_a_broken_generation_config(refused, broken_model: Path):
    (broken_model / "generation_config.json").write_text('{"eos_token_id": ')
    assert f"{broken_model}/generation_config.json" in refused(1, f"actor_rollout_ref.model.path={broken_model}")


def test_torn_weights(refused, broken_model: Path):
    weights = broken_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    line = refused(1, f"actor_rollout_ref.model.path={broken_model}", started=True)
    assert f"actor_rollout_ref.model.path: transformers cannot load {broken_model}" in line


def test_no_weights(refused, broken_model: Path):
    (broken_model / "model.safetensors").unlink()
    assert str(broken_model) in refused(1, f"critic.model.path={broken_model}", started=True)


def test_no_tokenizer(refused, broken_model: Path):
    for file in broken_model.glob("tokenizer*"):
        file.unlink()
    assert f"no tokenizer in {broken_model}" in refused(1, f"actor_rollout_ref.model.path={broken_model}")


def test_no_chat_template(refused, broken_model: Path):
    (broken_model / "chat_template.jinja").unlink()
    assert "has no chat template" in refused(1, f"actor_rollout_ref.model.path={broken_model}")


def test_no_end_token(refused, broken_model: Path):
    for name, key in (
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        file = broken_model / f"{name}.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != key}))
    assert "names an end token" in refused(1, f"actor_rollout_ref.model.path={broken_model}")


# Data files ----------------------------------------------------------------------------------------------------------


def test_a_missing_file(refused):
    assert "/nowhere/train.parquet" in refused(78, "data.train_files=/nowhere/train.parquet")


def test_a_missing_validation_file_counts_when_it_is_needed(refused):
    assert "/nowhere/test.parquet" in refused(78, "data.val_files=/nowhere/test.parquet", "trainer.test_freq=1")


def test_a_file_without_rows(refused, tmp_path: Path):
    file = write_rows(tmp_path / "none.parquet", rows())
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(0, 0), file)
    assert f"{file}" in refused(1, f"data.train_files={file}")


def test_a_file_of_another_kind(refused, tmp_path: Path):
    file = tmp_path / "text.parquet"
    file.write_text("once upon a time")
    assert f"{file}" in refused(1, f"data.train_files={file}")


def test_a_torn_file(refused, tmp_path: Path):
    file = write_rows(tmp_path / "torn.parquet", rows())
    file.write_bytes(file.read_bytes()[:-20])
    assert f"{file}" in refused(1, f"data.train_files={file}")


def test_a_row_without_ground_truth(refused, tmp_path: Path):
    without = rows()
    without[5]["reward_model"] = {"style": "rule", "ground_truth": None}
    file = write_rows(tmp_path / "without.parquet", without)
    assert f"{file}, row 5: no ground truth" in refused(1, f"data.train_files={file}")


def test_fewer_rows_than_one_batch(refused, tmp_path: Path):
    file = write_rows(tmp_path / "few.parquet", rows(7))
    assert "7 prompts, fewer than data.train_batch_size=8" in refused(1, f"data.train_files={file}")


def test_no_scorer_for_the_data(refused, tmp_path: Path):
    other = [{**row, "data_source": "someone/else"} for row in rows()]
    file = write_rows(tmp_path / "other.parquet", other)
    line = refused(1, f"data.train_files={file}", "reward.custom_reward_function.path=null")
    assert "no scorer for data_source 'someone/else'" in line


@pytest.fixture
def one_long_prompt(tmp_path: Path) -> Path:
    """Row 3 holds a prompt of some 2000 tokens, the others some 100."""
    prompts = rows()
    prompts[3]["prompt"] = [{"role": "user", "content": "What is 2 + 2? " * 200}]
    return write_rows(tmp_path / "long.parquet", prompts)


def test_a_prompt_over_the_cap(refused, one_long_prompt: Path):
    line = refused(1, f"data.train_files={one_long_prompt}", started=True)
    assert f"{one_long_prompt}, row 3: the prompt has" in line
    assert "more than data.max_prompt_length=256" in line


@pytest.mark.parametrize("mode", ["left", "right", "middle"])
def test_a_prompt_cut_to_the_cap_is_trained_on(inputs: Inputs, tmp_path: Path, one_long_prompt: Path, mode: str):
    run_dir = tmp_path / "run"
    assert (
        train_here(
            inputs.overrides(
                run_dir, f"data.train_files={one_long_prompt}", "data.shuffle=False", f"data.truncation={mode}"
            )
        )
        == 0
    )
    (step,) = metrics(run_dir)
    assert step["prompt_length/max"] == 256
    assert step["prompt_length/clip_ratio"] == 1 / 8
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    text = tokenizer.decode(samples(run_dir, 1)[3]["prompt_ids"])
    assert text.startswith("<|im_start|>") == (mode != "left")
    assert text.endswith("assistant\n") == (mode != "right")


def test_overlong_prompts_filtered_out(inputs: Inputs, tmp_path: Path, one_long_prompt: Path):
    more = ["data.filter_overlong_prompts=True", "data.train_batch_size=4", f"data.train_files={one_long_prompt}"]
    assert train_here(inputs.overrides(tmp_path / "run", *more)) == 0
    assert 3 not in [row["row"] for row in samples(tmp_path / "run", 1)]


# As processes --------------------------------------------------------------------------------------------------------


def test_the_command_ends_with_the_code_and_the_line(inputs: Inputs, tmp_path: Path):
    done = train(inputs.overrides(tmp_path / "run", "trainer.nnode=2"))
    assert done.returncode == 78
    assert error_line(done.stderr) in done.stderr.strip().splitlines()[-1]
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_an_error_inside_the_run_has_no_traceback(inputs: Inputs, tmp_path: Path, one_long_prompt: Path):
    overrides = inputs.overrides(tmp_path / "run", f"data.train_files={one_long_prompt}")
    done = train(overrides, {"OMP_DISPLAY_ENV": "true"})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr  # torch was imported with it: its threads do not spin
    error_line(done.stderr)
    assert_whole(tmp_path / "run")


def test_nobody_listens_at_the_address(refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    line = refused(75, "trainer.n_gpus_per_node=2", "trainer.cluster_wait=0.5", started=True)
    assert "no Ray cluster at 127.0.0.1:9 after 0.5 s" in line


@pytest.mark.parametrize("asked", ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"])
def test_a_cluster_that_is_too_small(inputs: Inputs, tmp_path: Path, small_cluster: str, asked: str):
    done = train(
        inputs.overrides(tmp_path / "run", asked, "trainer.cluster_wait=1"), environ={"RAY_ADDRESS": small_cluster}
    )
    assert done.returncode == 75
    assert "found 1 node with 1 CPU after 1 s; need" in error_line(done.stderr)
    assert "Traceback" not in done.stderr
    assert_whole(tmp_path / "run")


@pytest.fixture(scope="module")
def small_cluster():
    with LocalCluster.start(nodes=1, devices_per_node=1, resource="CPU") as cluster:
        yield cluster.address


@pytest.mark.slow
def test_a_mistake_found_by_the_ranks(inputs: Inputs, tmp_path: Path, broken_model: Path):
    (broken_model / "model.safetensors").unlink()
    done = train(
        inputs.overrides(tmp_path / "run", "trainer.n_gpus_per_node=2", f"critic.model.path={broken_model}"),
    )
    assert done.returncode == 1
    assert "(node-0 rank" in error_line(done.stderr)
    assert_whole(tmp_path / "run")
