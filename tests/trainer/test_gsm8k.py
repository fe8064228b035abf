"""Real GSM8K rows through the trainer: with the tiny model, and with a real 135 M instruct model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corral.data.gsm8k import write_gsm8k
from corral.engine.smollm2 import write_smollm2
from tests.trainer.runs import Inputs, metrics, samples, train

SOURCE = Path(os.environ.get("CORRAL_TEST_DATA", "/nonexistent")) / "gsm8k"
pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="needs GSM8K under CORRAL_TEST_DATA/gsm8k")


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k") / "data"
    write_gsm8k(SOURCE, folder)
    return folder


def assert_trained(run_dir: Path) -> None:
    (step,) = metrics(run_dir)
    assert all(value == value and abs(value) < 1e9 for value in step.values())
    assert step["actor/grad_norm"] > 0
    assert step["critic/grad_norm"] > 0
    assert step["training/rollout_probs_diff_max"] < 1e-3


def test_the_tiny_model_trains_on_real_rows(inputs: Inputs, gsm8k: Path, tmp_path: Path):
    done = train(
        inputs.overrides(
            tmp_path,
            f"data.train_files={gsm8k}/train.parquet",
            f"data.val_files={gsm8k}/test.parquet",
            "data.max_prompt_length=512",
            "data.val_max_samples=8",
            "trainer.val_before_train=True",
            "reward.custom_reward_function.path=null",
        )
    )
    assert done.returncode == 0, done.stderr
    validation, step = metrics(tmp_path)
    assert validation["val-core/openai/gsm8k/reward/mean@1"] == 0.0  # an untrained model solves nothing
    assert step["prompt_length/mean"] > 50
    assert len(samples(tmp_path, 1)) == 8


@pytest.mark.slow
def test_a_real_model_takes_one_step_in_process(inputs: Inputs, gsm8k: Path, tmp_path: Path):
    model = tmp_path / "smollm2"
    write_smollm2(model)
    done = train(
        inputs.overrides(
            tmp_path,
            f"data.train_files={gsm8k}/train.parquet",
            "data.max_prompt_length=512",
            "data.max_response_length=128",
            f"actor_rollout_ref.model.path={model}",
            f"critic.model.path={model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
            "critic.ppo_max_token_len_per_gpu=1024",
            "reward.custom_reward_function.path=null",
        )
    )
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path)
    texts = [row["output"] for row in samples(tmp_path, 1)]
    assert sum(text.isascii() and " the " in text for text in texts) >= 4  # it answers in English
