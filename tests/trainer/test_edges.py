"""Unusual batches and settings: trained on without NaN, with weights that are finite and not what they were."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.recorded import record, skip_overrides
from tests.trainer.runs import Inputs, metrics, samples, train_here, weights

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
FAST = [
    "reward.num_workers=1",
    f"{ACTOR}.optim.lr=1e-3",
    f"{CRITIC}.optim.lr=1e-3",
    "trainer.save_freq=1",
    "data.shuffle=False",
]


@pytest.fixture
def trained(inputs: Inputs, tmp_path: Path):
    """One step with `more`; its metrics, after checking that they and the weights are sound."""

    def run(*more: str) -> dict[str, float]:
        overrides = inputs.overrides(tmp_path / "run", *FAST, *more)
        assert train_here(overrides) == 0
        assert_sound(inputs, tmp_path / "run")
        return metrics(tmp_path / "run")[-1]

    return run


def assert_sound(inputs: Inputs, run_dir: Path) -> None:
    for step in metrics(run_dir):
        strange = {name: value for name, value in step.items() if not math.isfinite(value)}
        assert strange == {}
        assert step["critic/skipped_steps"] == 0
    before = load_file(inputs.model / "model.safetensors")
    last = len(metrics(run_dir))
    for role in ("actor", "critic"):
        after = weights(run_dir, last, role)
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
        assert any(not torch.equal(after[name], before[name]) for name in after.keys() & before.keys())


def reward(tmp_path: Path, body: str) -> str:
    """The override for a reward whose function ends in `body`."""
    file = tmp_path / "reward_of_test.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    return f"reward.custom_reward_function.path={file}"


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [{3}, {0, 1, 2, 3}, {0, 7}], ids=["one", "a whole mini-batch", "first and last"])
def test_empty_responses(inputs: Inputs, tmp_path: Path, trained, empty: set[int]):
    skip = skip_overrides(tmp_path / "dumps", 1)
    record(inputs.overrides(tmp_path / "first", *FAST, *skip), lambda i, ids: [] if i in empty else ids)
    step = trained(*skip)
    assert step["rollout/replayed"] == 1
    assert step["response/aborted_ratio"] == len(empty) / 8
    assert step["response_length/min"] == 0
    assert step["response_length_non_aborted/min"] > 0


def test_nothing_but_empty_responses(inputs: Inputs, tmp_path: Path):
    skip = skip_overrides(tmp_path / "dumps", 1)
    record(inputs.overrides(tmp_path / "first", *FAST, *skip), lambda i, ids: [])
    assert train_here(inputs.overrides(tmp_path / "run", *FAST, *skip)) == 0
    (step,) = metrics(tmp_path / "run")
    assert all(math.isfinite(value) for value in step.values())
    assert step["response/aborted_ratio"] == 1
    assert step["actor/pg_loss"] == step["critic/vf_loss"] == 0
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run", 1, "actor").values())


def test_responses_exactly_at_the_cap(trained):
    step = trained(f"{ROLLOUT}.ignore_eos=True")
    assert step["response_length/min"] == step["response_length/max"] == 24
    assert step["response_length/clip_ratio"] == 1


def test_responses_of_one_token(trained):
    assert trained("data.max_response_length=1")["response_length/max"] == 1


def test_a_batch_of_one_prompt(trained):
    step = trained("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1")
    assert step["actor/skipped_steps"] == 0


def test_a_batch_of_one_token(trained):
    """The smallest there is: its advantage has no variance to be divided by."""
    step = trained("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", "data.max_response_length=1")
    assert step["perf/total_num_tokens"] > 0


@pytest.mark.parametrize("score", ["0.0", "1", "-1e4"])
def test_equal_rewards(tmp_path: Path, trained, score: str):
    step = trained(reward(tmp_path, f"return {score}"))
    assert step["critic/score/min"] == step["critic/score/max"] == float(score)


def test_a_prompt_exactly_at_the_cap(inputs: Inputs, tmp_path: Path, trained):
    trained()
    longest = max(len(row["prompt_ids"]) for row in samples(tmp_path / "run", 1))
    step = trained(f"data.max_prompt_length={longest}")
    assert step["prompt_length/max"] == longest
    assert step["prompt_length/clip_ratio"] > 0
    assert train_here(inputs.overrides(tmp_path / "over", *FAST, f"data.max_prompt_length={longest - 1}")) == 1


def test_samples_over_the_token_budget(trained, caplog: pytest.LogCaptureFixture):
    whole = trained(f"{ACTOR}.ppo_max_token_len_per_gpu=4096", "critic.ppo_max_token_len_per_gpu=4096")
    assert not [line for line in caplog.messages if "micro-batch of its own" in line]
    cut = trained(f"{ACTOR}.ppo_max_token_len_per_gpu=100", "critic.ppo_max_token_len_per_gpu=100")
    warned = [
        line for line in caplog.messages if "over the actor's budget of 100, it gets a micro-batch of its own" in line
    ]
    assert 1 <= len(warned) <= 8
    assert len(set(warned)) == len(warned)
    assert cut["actor/pg_loss"] == pytest.approx(whole["actor/pg_loss"], rel=1e-4, abs=1e-6)
    assert cut["critic/vf_loss"] == pytest.approx(whole["critic/vf_loss"], rel=1e-4)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        [f"{ROLLOUT}.n=3"],
        [f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=True", "critic.ppo_epochs=2", "critic.shuffle=True"],
        [
            f"{ACTOR}.use_dynamic_bsz=False",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
            "critic.use_dynamic_bsz=False",
            "critic.ppo_micro_batch_size_per_gpu=2",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
        ],
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"],
        [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01"],
        [f"{ACTOR}.optim.clip_grad=1e-8", "critic.optim.clip_grad=1e-8"],
        ["algorithm.gamma=0", "algorithm.lam=0"],
        [f"{ROLLOUT}.temperature=0.3", f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.top_p=0.8"],
        [
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "critic.model.enable_gradient_checkpointing=True",
        ],
    ],
    ids=lambda more: more[0],
)
def test_settings(trained, more: list[str]):
    trained(*more)


def test_the_kl_in_the_loss_reports_its_coefficient(trained):
    step = trained(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.25")
    assert step["actor/kl_coef"] == 0.25
    assert step["actor/kl_loss"] >= 0


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"],
)
def test_each_aggregation(trained, mode: str):
    trained(f"{ACTOR}.loss_agg_mode={mode}", f"critic.loss_agg_mode={mode}", f"{ACTOR}.entropy_coeff=0.01")


def test_critic_warmup_leaves_the_actor_alone(inputs: Inputs, tmp_path: Path, trained):
    trained("trainer.critic_warmup=1", "trainer.total_training_steps=2")
    first, second = metrics(tmp_path / "run")
    assert "actor/pg_loss" not in first
    assert "actor/pg_loss" in second
    before = load_file(inputs.model / "model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "run", 1, "actor").items())


def test_the_first_mini_batch_is_on_policy(trained):
    step = trained(f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=2")
    assert step["actor/pg_clipfrac"] == step["actor/pg_clipfrac_lower"] == 0
    assert abs(step["actor/ppo_kl"]) <= 1e-6
    # With ratio 1 the loss is minus the mean of whitened advantages.
    assert abs(step["actor/pg_loss"]) <= 1e-6
    assert step["training/rollout_probs_diff_max"] <= 1e-4


def test_epochs_are_counted_from_the_batch_that_was_trained_on(tmp_path: Path, trained):
    trained("data.train_max_samples=8", "trainer.total_training_steps=2")
    assert [step["training/epoch"] for step in metrics(tmp_path / "run")] == [0, 1]


# Numbers that overflow -----------------------------------------------------------------------------------------------


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("role", "more"),
    [("actor", [f"{ACTOR}.entropy_coeff=1e38"]), ("critic", ["REWARD"])],
)
def test_non_finite_gradients_are_skipped_counted_and_end_the_run(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, more: list[str]
):
    more = [reward(tmp_path, "return 1e30") if item == "REWARD" else item for item in more]
    code = train_here(inputs.overrides(tmp_path / "run", *FAST, "trainer.total_training_steps=9", *more))
    assert code == 1
    assert "non-finite gradients in 3 iterations in a row, the last is step 3" in last_error(capsys)
    steps = metrics(tmp_path / "run")
    assert [step[f"{role}/skipped_steps"] for step in steps] == [2, 2, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    before = load_file(inputs.model / "model.safetensors")
    after = weights(tmp_path / "run", 3, role)
    assert all(torch.equal(after[name], before[name]) for name in after.keys() & before.keys())
    if role == "actor":
        assert not any("rollout/probe_gap" in step for step in steps)


def test_weights_that_overflow(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = train_here(
        inputs.overrides(tmp_path / "run", *FAST, f"{ACTOR}.optim.lr=1e30", "trainer.total_training_steps=5")
    )
    assert code == 1
    assert "non-finite gradients in 3 iterations in a row" in last_error(capsys)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_model_with_a_nan(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str):
    folder = Path(shutil.copytree(inputs.model, tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    key = "actor_rollout_ref.model.path" if role == "actor" else "critic.model.path"
    code = train_here(inputs.overrides(tmp_path / "run", *FAST, f"critic.model.path={inputs.model}", f"{key}={folder}"))
    assert code == 1
    assert "not finite" in (line := last_error(capsys))
    assert role in line
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")
