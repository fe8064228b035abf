"""Validation: when it happens, on what, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import Inputs, metrics, train_here

VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"
LENGTH_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["split"] == "test")
"""


@pytest.fixture
def validated(inputs: Inputs, tmp_path: Path):
    """Runs with the validation set and a reward that is 1 on its rows and 0 on training rows; the metrics."""
    (tmp_path / "split.py").write_text(LENGTH_REWARD)

    def run(*more: str) -> list[dict[str, float]]:
        overrides = inputs.overrides(
            tmp_path / "run",
            f"data.val_files={inputs.data}/test.parquet",
            f"reward.custom_reward_function.path={tmp_path}/split.py",
            "reward.num_workers=1",
            *more,
        )
        assert train_here(overrides) == 0
        return metrics(tmp_path / "run")

    return run


MEAN = "val-core/corral/arithmetic/reward/mean@1"


def test_validation_alone(validated, tmp_path: Path):
    (only,) = validated("trainer.val_only=True")
    assert only == {"step": 0, MEAN: 1.0, "val-aux/response_length/mean": only["val-aux/response_length/mean"]}
    assert 1 <= only["val-aux/response_length/mean"] <= 24
    assert not (tmp_path / "run" / "samples").exists()


def test_never_unless_asked(validated):
    assert not [name for step in validated() for name in step if name.startswith("val-")]


def test_every_other_step_before_the_first_and_after_the_last(validated):
    steps = validated("trainer.test_freq=2", "trainer.total_training_steps=3")
    assert {step["step"]: step.get(MEAN) for step in steps} == {0: 1.0, 1: None, 2: 1.0, 3: 1.0}
    assert all(step["critic/score/mean"] == 0 for step in steps if step["step"])
    assert all((MEAN in step) == ("timing_s/testing" in step) for step in steps if step["step"])


def test_not_before_the_first_when_told_so(validated):
    assert [step["step"] for step in validated("trainer.test_freq=1", "trainer.val_before_train=False")] == [1]


def test_before_the_first_alone(validated):
    first, second = validated("trainer.val_before_train=True")
    assert MEAN in first
    assert MEAN not in second


def test_several_samples_a_prompt(validated):
    sampled = [f"{VAL_KWARGS}.n=3", f"{VAL_KWARGS}.do_sample=True", f"{VAL_KWARGS}.temperature=1.0"]
    (only,) = validated("trainer.val_only=True", "data.val_max_samples=2", *sampled)
    assert only["val-core/corral/arithmetic/reward/mean@3"] == 1.0


def test_greedy_validation_does_not_disturb_training(validated):
    """The samples trained on are the same with and without validation in between."""
    plain = validated("trainer.total_training_steps=2")
    tested = validated("trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.val_before_train=True")
    for with_none, with_some in zip(plain, tested[1:], strict=True):
        assert with_some["response_length/mean"] == with_none["response_length/mean"]
        assert with_some["actor/pg_loss"] == with_none["actor/pg_loss"]
        assert with_some["critic/vf_loss"] == with_none["critic/vf_loss"]


def test_a_large_set_says_what_it_costs_and_scores_every_row(validated, caplog: pytest.LogCaptureFixture):
    large = validated("trainer.val_only=True", "trainer.val_cost_rows=3", "actor_rollout_ref.rollout.max_num_seqs=4")
    first, second = [line for line in caplog.messages if line.startswith("validation:")]
    assert first == "validation: 8 prompts, up to 192 tokens to generate on a CPU; limit it with data.val_max_samples"
    assert second.startswith("validation: about ")
    caplog.clear()
    assert validated("trainer.val_only=True") == large
    assert not [line for line in caplog.messages if line.startswith("validation:")]
