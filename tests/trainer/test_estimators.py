"""Every estimator by name, and a user's own estimator, loss and reward, through a real step on the tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from corral.algorithms.advantages import ESTIMATORS, TRAITS
from tests.trainer.parity import IGNORED
from tests.trainer.recorded import skip_overrides
from tests.trainer.runs import REWARDS, Inputs, metrics, samples, train, train_here, weights

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HOOKS = f"{REWARDS}/user_hooks.py"
COMPONENTS = f"reward.custom_reward_function.path={REWARDS}/component_reward.py"
SMALL = [
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=2",
    "data.max_response_length=12",
    "data.shuffle=False",
    "reward.num_workers=1",
    f"{ACTOR}.optim.lr=1e-3",
    "trainer.save_freq=1",
]


def step(inputs: Inputs, run_dir: Path, *more: str) -> dict[str, float]:
    """One sound step with `more`: finite metrics, nothing skipped, weights that are finite and changed."""
    assert train_here(inputs.overrides(run_dir, *SMALL, *more)) == 0
    (out,) = metrics(run_dir)
    assert {name: value for name, value in out.items() if not math.isfinite(value)} == {}
    assert out["actor/skipped_steps"] == 0
    assert out["actor/grad_norm"] > 0
    before, after = load_file(inputs.model / "model.safetensors"), weights(run_dir, 1, "actor")
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in after.keys() & before.keys())
    return out


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_trains(inputs: Inputs, tmp_path: Path, name: str):
    traits = TRAITS[name]
    n = 2 + sorted(ESTIMATORS).index(name) % 3 if traits.needs_groups else 1
    more = [f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n={n}"]
    if traits.needs_components:
        more += [COMPONENTS, "algorithm.gdpo_reward_keys=[acc,brevity]", "algorithm.gdpo_reward_weights=[1.0,0.5]"]
    out = step(inputs, tmp_path, *more)
    assert len(samples(tmp_path, 1)) == 4 * n
    assert out["critic/advantages/max"] > out["critic/advantages/min"]
    # A critic is built, run and trained exactly when the estimator reads its values.
    assert ("critic/vf_loss" in out) == ("timing_s/values" in out) == traits.needs_critic
    assert (tmp_path / "global_step_1" / "critic").exists() == traits.needs_critic
    assert ("remax/baseline/mean" in out) == traits.needs_greedy_baseline
    assert ("gdpo/brevity/mean" in out) == traits.needs_components


def test_remax_compares_with_the_greedy_response(inputs: Inputs, tmp_path: Path):
    """When sampling is greedy itself, nothing is better than the baseline."""
    more = ["algorithm.adv_estimator=remax", f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.n=2"]
    assert train_here(inputs.overrides(tmp_path, *SMALL, *more)) == 0
    (out,) = metrics(tmp_path)
    assert out["critic/advantages/max"] == out["critic/advantages/min"] == 0
    assert out["remax/baseline/mean"] == pytest.approx(out["critic/score/mean"])
    assert len(samples(tmp_path, 1)) == 8  # the greedy samples are not trained on


def test_remax_generates_its_baselines_in_a_replayed_step_too(inputs: Inputs, tmp_path: Path):
    more = ["algorithm.adv_estimator=remax", *skip_overrides(tmp_path / "dumps", 1)]
    first, again = (step(inputs, tmp_path / name, *more) for name in ("first", "again"))
    assert (first["rollout/replayed"], again["rollout/replayed"]) == (0, 1)
    assert again["remax/baseline/mean"] == first["remax/baseline/mean"]
    assert again["critic/advantages/max"] == pytest.approx(first["critic/advantages/max"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [
            "algorithm.adv_estimator=optimal_token_baseline",
            "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_rs=[token_k3]",
            "algorithm.rollout_correction.rollout_rs_threshold=1.0",
            f"{ACTOR}.policy_loss.loss_mode=kl_cov",
        ],
        [
            f"algorithm.adv_estimator={HOOKS}:three_quarters",
            f"{ACTOR}.policy_loss.loss_mode={HOOKS}:likelihood",
            f"reward.custom_reward_function.path={HOOKS}",
        ],
        [
            "algorithm.adv_estimator=remax",
            COMPONENTS,
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "algorithm.rollout_correction.bypass_mode=True",
            "algorithm.rollout_correction.loss_type=reinforce",
            "algorithm.rollout_correction.rollout_is=token",
        ],
    ],
    ids=["statistics", "hooks", "sampling"],
)
def test_four_ranks_take_the_step_of_one(inputs: Inputs, tmp_path: Path, more: list[str]):
    """In float64, two nodes of two ranks that share each sequence."""
    types = [f"{ACTOR}.fsdp_config.{key}=float64" for key in ("model_dtype", "dtype")]
    split = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    for name, where in (("one", []), ("four", split)):
        done = train(inputs.overrides(tmp_path / name, *SMALL, f"{ROLLOUT}.n=2", *types, *more, *where))
        assert done.returncode == 0, done.stderr
    (one,), (four,) = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert samples(tmp_path / "one", 1) == samples(tmp_path / "four", 1)
    for name in sorted(name for name in one if not name.startswith(IGNORED)):
        assert four[name] == pytest.approx(one[name], rel=1e-9, abs=1e-9), name
    before, after = weights(tmp_path / "one", 1, "actor"), weights(tmp_path / "four", 1, "actor")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)


def test_a_missing_reward_component_names_row_and_key(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=2", COMPONENTS, "algorithm.gdpo_reward_keys=[acc,tidiness]"]
    assert train_here(inputs.overrides(tmp_path, *SMALL, *more)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    for said in ("row 0", "'tidiness'", "algorithm.gdpo_reward_keys", "acc, brevity"):
        assert said in line


def test_a_component_that_is_no_number(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=2", COMPONENTS, "algorithm.gdpo_reward_keys=[label]"]
    assert train_here(inputs.overrides(tmp_path, *SMALL, *more)) == 1
    assert "'label' as a finite number, and the function returned 'text'" in capsys.readouterr().err


def test_pf_ppo_trains_on_samples_drawn_by_their_scores(inputs: Inputs, tmp_path: Path):
    plain = step(inputs, tmp_path / "plain", f"{ROLLOUT}.n=2")
    drawn = step(inputs, tmp_path / "drawn", f"{ROLLOUT}.n=2", "algorithm.use_pf_ppo=True")
    # The batch, its scores and its advantages are the same; what is trained on is not.
    for name in ("critic/score/mean", "critic/advantages/max", "response_length/mean"):
        assert drawn[name] == plain[name]
    assert drawn["actor/grad_norm"] != plain["actor/grad_norm"]
    assert drawn["critic/vf_loss"] != plain["critic/vf_loss"]


def test_the_adaptive_coefficient_follows_the_kl_of_the_run(inputs: Inputs, tmp_path: Path):
    more = [
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.kl_ctrl.horizon=40",
        "trainer.total_training_steps=3",
    ]
    assert train_here(inputs.overrides(tmp_path, *SMALL, *more)) == 0
    first, second, third = metrics(tmp_path)
    coefficients = [out["actor/reward_kl_penalty_coeff"] for out in (first, second, third)]
    assert coefficients[0] == 0.1
    for out, now, then in zip((first, second), coefficients, coefficients[1:], strict=False):
        error = min(max(out["actor/reward_kl_penalty"] / 0.01 - 1, -0.2), 0.2)
        assert then == pytest.approx(now * (1 + error * 4 / 40), rel=1e-12)
    assert coefficients[1] < 0.1  # the first step is on the reference itself


# Hooks ---------------------------------------------------------------------------------------------------------------


def test_a_users_estimator_loss_and_reward(inputs: Inputs, tmp_path: Path):
    out = step(
        inputs,
        tmp_path,
        f"algorithm.adv_estimator={HOOKS}:three_quarters",
        f"{ACTOR}.policy_loss.loss_mode={HOOKS}:likelihood",
        f"reward.custom_reward_function.path={HOOKS}",
    )
    assert out["critic/score/min"] == out["critic/score/max"] == 0.25
    assert out["critic/advantages/min"] == out["critic/advantages/max"] == 0.75
    assert "critic/vf_loss" not in out
    # Its loss: −¾ of the mean log-prob, at the weights of two optimizer steps; its statistic: that mean.
    assert out["actor/likelihood/mean"] < -1
    assert out["actor/pg_loss"] == pytest.approx(-0.75 * out["actor/likelihood/mean"], rel=0.05)
    assert "actor/pg_clipfrac" not in out


def test_the_same_hooks_as_modules(inputs: Inputs, tmp_path: Path):
    out = step(
        inputs,
        tmp_path,
        "algorithm.adv_estimator=tests.trainer.user_hooks:three_quarters",
        f"{ACTOR}.policy_loss.loss_mode=tests.trainer.user_hooks:likelihood",
        "reward.custom_reward_function.path=tests.trainer.user_hooks",
    )
    assert (out["critic/score/mean"], out["critic/advantages/mean"]) == (0.25, 0.75)
    assert out["actor/likelihood/mean"] < -1


@pytest.mark.parametrize(
    ("key", "name", "code", "said"),
    [
        ("algorithm.adv_estimator", "three_quarts", 78, "has no 'three_quarts'"),
        (f"{ACTOR}.policy_loss.loss_mode", "likelyhood", 78, "has no 'likelyhood'"),
        ("algorithm.adv_estimator", "too_short", 1, "expected a tensor"),
    ],
)
def test_a_hook_that_does_not_fit_is_one_line(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, name: str, code: int, said: str
):
    assert train_here(inputs.overrides(tmp_path, *SMALL, f"{key}={HOOKS}:{name}")) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said in line
    assert name in line
