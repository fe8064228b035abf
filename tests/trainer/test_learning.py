"""It learns in the right direction, from a reward that anyone can raise: the share of digits in the response."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import Inputs, metrics, train

REWARD = Path(__file__).parents[2] / "examples" / "digit_share_reward.py"


def digits(inputs: Inputs, run_dir: Path, *more: str) -> list[float]:
    """Mean reward of each PPO step."""
    done = train(
        inputs.overrides(
            run_dir,
            "data.train_batch_size=32",
            "data.max_response_length=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "critic.optim.lr=1e-3",
            f"reward.custom_reward_function.path={REWARD}",
            *more,
        )
    )
    assert done.returncode == 0, done.stderr
    return [step["critic/score/mean"] for step in metrics(run_dir)]


def test_thirty_steps_lift_the_reward_above_nine_tenths(inputs: Inputs, tmp_path: Path):
    rewards = digits(inputs, tmp_path, "trainer.total_training_steps=30", "trainer.total_epochs=30")
    assert rewards[0] < 0.1
    assert max(rewards[-3:]) > 0.9


@pytest.mark.slow
def test_the_negated_reward_falls(inputs: Inputs, tmp_path: Path):
    """From a model that has learnt to write digits, the negated reward takes them away again."""
    up = tmp_path / "up"
    digits(inputs, up, "trainer.total_training_steps=30", "trainer.total_epochs=30", "trainer.save_freq=30")
    down = tmp_path / "down"
    learnt = up / "global_step_30" / "actor" / "huggingface"
    shares = digits(
        inputs,
        down,
        f"actor_rollout_ref.model.path={learnt}",
        f"critic.model.path={inputs.model}",
        "+reward.custom_reward_function.reward_kwargs.sign=-1",
        "trainer.total_training_steps=15",
        "trainer.total_epochs=30",
    )
    assert -shares[0] > 0.9
    assert -shares[-1] < 0.3
