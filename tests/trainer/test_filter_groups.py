"""Dynamic sampling: an iteration trains on groups whose metric varies, and generates until it has enough of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from corral.trainer.collection import HOPELESS, varying_groups
from tests.trainer.recorded import skip_overrides
from tests.trainer.runs import REWARDS, Inputs, metrics, samples, train_here

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
N = 3
PROMPTS = 4


@pytest.fixture
def overrides(inputs: Inputs):
    """GRPO on 4 prompts × 3 samples that filters by `acc`, which does not vary in rows divisible by `dull_every`."""

    def make(run_dir: Path, dull_every: int, *more: str) -> list[str]:
        return inputs.overrides(
            run_dir,
            f"data.train_batch_size={PROMPTS}",
            f"{ACTOR}.ppo_mini_batch_size=2",
            "data.max_response_length=12",
            "data.shuffle=False",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={REWARDS}/component_reward.py",
            f"+reward.custom_reward_function.reward_kwargs.dull_every={dull_every}",
            "algorithm.adv_estimator=grpo",
            f"{ROLLOUT}.n={N}",
            f"{ROLLOUT}.ignore_eos=True",  # twelve random tokens each: no two responses are equal
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            *more,
        )

    return make


def rows(run_dir: Path, step: int = 1) -> list[int]:
    """Data row of each group that was trained on; a group's samples lie next to each other."""
    found = samples(run_dir, step)
    assert len(found) == PROMPTS * N
    groups = [found[i : i + N] for i in range(0, len(found), N)]
    assert all(len({sample["row"] for sample in group}) == 1 for group in groups)
    return [group[0]["row"] for group in groups]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def test_groups_that_do_not_vary_are_replaced_by_those_of_further_prompts(overrides, tmp_path: Path):
    assert train_here(overrides(tmp_path, 2)) == 0
    assert rows(tmp_path) == [1, 3, 5, 7]
    (out,) = metrics(tmp_path)
    assert all(math.isfinite(value) for value in out.values())
    assert out["filter_groups/gen_batches"] == 2
    assert out["filter_groups/generated_groups"] == 8
    assert out["filter_groups/varying_groups"] == 4
    assert out["filter_groups/surplus_groups"] == 0
    assert out["filter_groups/varying_share"] == 0.5


def test_groups_beyond_the_batch_are_dropped_from_its_end(overrides, tmp_path: Path):
    more = ["trainer.total_training_steps=2", f"trainer.rollout_data_dir={tmp_path}/samples"]
    assert train_here(overrides(tmp_path, 4, *more)) == 0
    assert rows(tmp_path) == [1, 2, 3, 5]  # 6 and 7 were generated too
    assert rows(tmp_path, 2) == [9, 10, 11, 13]  # the loader went on behind them
    assert [out["filter_groups/surplus_groups"] for out in metrics(tmp_path)] == [2, 2]


def test_nothing_is_dropped_when_everything_varies(overrides, tmp_path: Path):
    assert train_here(overrides(tmp_path, 0, "algorithm.filter_groups.metric=score")) == 0
    assert rows(tmp_path) == [0, 1, 2, 3]
    assert metrics(tmp_path)[0]["filter_groups/gen_batches"] == 1


def test_the_limit_ends_the_run_with_its_numbers(overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train_here(overrides(tmp_path, 2, "algorithm.filter_groups.max_num_gen_batches=1")) == 1
    line = error_line(capsys)
    for said in ("step 1", "after 1 generation batches of 4 prompts", "2 of the 4", "acc", "max_num_gen_batches=1"):
        assert said in line
    assert metrics(tmp_path) == []


def test_a_limit_that_is_enough(overrides, tmp_path: Path):
    assert train_here(overrides(tmp_path, 2, "algorithm.filter_groups.max_num_gen_batches=2")) == 0
    assert rows(tmp_path) == [1, 3, 5, 7]


def test_without_a_limit_data_that_never_varies_ends_the_run(
    overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = ["data.train_max_samples=8", "data.max_response_length=2"]
    assert train_here(overrides(tmp_path, 1, *more)) == 1
    line = error_line(capsys)
    assert f"after {HOPELESS} generation batches of 4 prompts, 0 of the 4" in line
    assert "all of the data" in line


def test_scarce_data_rolls_over_into_the_next_epoch_with_other_samples(overrides, tmp_path: Path):
    """One batch holds all rows, and half of them vary: each step needs two epochs."""
    more = ["data.train_max_samples=4", "trainer.total_epochs=9", "trainer.total_training_steps=2"]
    assert train_here(overrides(tmp_path, 2, *more)) == 0
    assert rows(tmp_path, 1) == rows(tmp_path, 2) == [1, 3, 1, 3]
    first, second = metrics(tmp_path)
    assert (first["training/epoch"], second["training/epoch"]) == (0, 2)
    found = samples(tmp_path, 1)
    assert [sample["sample_index"] for sample in found] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    responses = [tuple(sample["response_ids"]) for sample in found]
    assert responses[:6] != responses[6:]


def test_a_metric_the_scorer_does_not_return(overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train_here(overrides(tmp_path, 2, "algorithm.filter_groups.metric=tidiness")) == 1
    line = error_line(capsys)
    for said in ("row 0", "'tidiness'", "algorithm.filter_groups.metric", "score, acc, brevity"):
        assert said in line


def test_the_kept_batch_is_what_skip_rollout_records(overrides, tmp_path: Path):
    skip = skip_overrides(tmp_path / "dumps", 1)
    assert train_here(overrides(tmp_path / "first", 2, *skip)) == 0
    assert train_here(overrides(tmp_path / "again", 2, *skip)) == 0
    (first,), (again,) = metrics(tmp_path / "first"), metrics(tmp_path / "again")
    assert (first["rollout/replayed"], again["rollout/replayed"]) == (0, 1)
    assert samples(tmp_path / "again", 1) == samples(tmp_path / "first", 1)
    assert again["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-5)


def test_a_recording_of_other_prompts_is_generated_anew(overrides, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    skip = [*skip_overrides(tmp_path / "dumps", 1), "data.max_prompt_length=90"]
    assert train_here(overrides(tmp_path / "first", 2, *skip, "data.truncation=right")) == 0
    assert train_here(overrides(tmp_path / "again", 2, *skip, "data.truncation=left")) == 0
    assert metrics(tmp_path / "again")[0]["rollout/replayed"] == 0
    assert "prompts of its data rows are others" in caplog.text


def test_remax_takes_baselines_of_the_kept_prompts(overrides, tmp_path: Path):
    assert train_here(overrides(tmp_path, 2, "algorithm.adv_estimator=remax")) == 0
    assert rows(tmp_path) == [1, 3, 5, 7]
    assert math.isfinite(metrics(tmp_path)[0]["remax/baseline/mean"])


def test_which_groups_vary():
    values = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 2.0], dtype=torch.float64)
    assert varying_groups(values, 3) == [1, 3]
    assert varying_groups(values, 2) == [1, 4, 5]
    assert varying_groups(values, 1) == []
