"""Rollout correction through the trainer: what an engine that disagrees does to masks, groups, losses and metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from corral.algorithms.advantages import ESTIMATORS
from corral.algorithms.aggregate import Denominators
from corral.batch import Batch
from corral.config.plan import Rejection, RolloutCorrection
from corral.trainer.advantages import corrected, with_advantages, with_rewards
from corral.trainer.collection import Collected
from corral.trainer.kl_coefficient import KLCoefficient
from tests.plans import tiny_plan
from tests.trainer.recorded import record, skip_overrides
from tests.trainer.runs import Inputs, metrics, train_here, weights

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RULE = "algorithm.rollout_correction"
RULES = RolloutCorrection(None, None, 2.0, False, (), False, "ppo_clip")


# On a small batch ----------------------------------------------------------------------------------------------------


def two_groups() -> Batch:
    """3 + 3 samples of 2 tokens, scores 0 .. 5; the engine is far off on sample 1 and on the last token of sample 3."""
    batch = Batch.from_samples(
        [[7]] * 6,
        [[1, 2]] * 6,
        row=[0, 0, 0, 1, 1, 1],
        sample_index=[0, 1, 2] * 2,
        group=[0, 0, 0, 1, 1, 1],
        finish=["stop"] * 6,
        rollout_log_probs=[[-1.0, -1.0], [-9.0, -9.0], [-1.0, -1.0], [-1.0, -9.0], [-1.0, -1.0], [-1.0, -1.0]],
        dtype=torch.float64,
    )
    scores = torch.zeros(12, dtype=torch.float64)
    scores[1::2] = torch.arange(6, dtype=torch.float64)
    return batch.with_fields(scores=scores)


def advantages(batch: Batch, rule: RolloutCorrection | None, estimator: str = "grpo") -> Batch:
    """The batch after correction, rewards and advantages; the trainer's log-probs are all −1."""
    plan = tiny_plan().algorithm
    plan = replace(plan, adv_estimator=estimator, norm_adv_by_std_in_grpo=False, rollout_correction=rule)
    batch, _ = corrected(plan, batch, torch.full((12,), -1.0, dtype=torch.float64))
    batch, _ = with_rewards(plan, batch, KLCoefficient(plan.kl_ctrl, 0.0))
    return with_advantages(ESTIMATORS[estimator], plan, batch, Collected(batch, [], None, [], False, 0, {}))[0]


def test_a_rejected_sample_neither_votes_nor_gets_an_advantage():
    """Field report: rejected responses still move the baseline of their group."""
    without = advantages(two_groups(), None).advantages
    assert without is not None
    assert without[::2].tolist() == [-1, 0, 1, -1, 0, 1]
    done = advantages(two_groups(), replace(RULES, rejections=(Rejection("seq_mean_k1", 0.5, 2.0),)))
    assert done.advantages is not None
    assert done.response_mask.tolist() == [True, True, False, False, True, True, False, False, *[True] * 4]
    # Scores 0 and 2 are left of the first group (mean 1), 4 and 5 of the second (mean 4.5).
    assert done.advantages[::2].tolist() == [-1, 0, 1, 0, -0.5, 0.5]


def test_a_rejected_token_leaves_its_sample_in_the_group():
    done = advantages(two_groups(), replace(RULES, rejections=(Rejection("token_k1", 0.5, 2.0),)))
    assert done.advantages is not None
    # Sample 3 lost the token its score lies on, not the score.
    assert done.response_mask[6:8].tolist() == [True, False]
    assert done.advantages.tolist() == [-1, -1, 0, 0, 1, 1, -1, 0, 0, 0, 1, 1]


def test_denominators_follow_the_mask():
    before = Denominators.of(two_groups())
    done = advantages(two_groups(), replace(RULES, rejections=(Rejection("seq_mean_k1", 0.5, 2.0),)))
    after = Denominators.of(done)
    assert (before.tokens, after.tokens) == (12, 8)
    assert before.samples == after.samples == 6


def test_weights_ride_along_and_old_log_probs_stay_the_trainers():
    done = advantages(two_groups(), replace(RULES, rollout_is="token"))
    assert done.rollout_is_weights is not None
    assert done.rollout_is_weights.tolist() == [1, 1, 2, 2, 1, 1, 1, 2, 1, 1, 1, 1]
    assert done.old_log_probs is not None
    assert done.old_log_probs.unique().tolist() == [-1]


def test_bypass_takes_the_engines_log_probs_and_rejects_by_the_trainers():
    rule = replace(RULES, rollout_is="token", bypass_mode=True, rejections=(Rejection("seq_mean_k1", 0.5, 2.0),))
    done = advantages(two_groups(), rule)
    assert done.old_log_probs is not None
    assert torch.equal(done.old_log_probs, two_groups().rollout_log_probs)
    assert done.rollout_is_weights is None  # its loss weighs, at the weights of each optimizer step
    assert int(done.response_mask.sum()) == 8


# Through a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def step(inputs: Inputs, tmp_path: Path):
    """GRPO on one step of 8 prompts × 2 recorded samples; the recording says every log-prob was −6."""
    fixed = [
        "data.max_response_length=12",
        "data.shuffle=False",
        "reward.num_workers=1",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        f"{ACTOR}.optim.lr=1e-3",
        "trainer.save_freq=1",
        *skip_overrides(tmp_path / "dumps", 1),
    ]
    record(inputs.overrides(tmp_path / "first", *fixed), lambda i, ids: ids)

    def run(name: str, *more: str) -> dict[str, float]:
        assert train_here(inputs.overrides(tmp_path / name, *fixed, *more)) == 0
        (out,) = metrics(tmp_path / name)
        assert {key: value for key, value in out.items() if not math.isfinite(value)} == {}
        assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / name, 1, "actor").values())
        assert out["rollout/replayed"] == 1
        return out

    return run


def test_a_disagreeing_engine(step):
    plain = step("plain")
    # Always reported, without any correction.
    assert plain["rollout_corr/k3_kl"] > 0.1
    assert plain["rollout_corr/rollout_log_ppl"] == pytest.approx(6)
    assert plain["rollout_corr/ppl_ratio"] != pytest.approx(1, abs=0.05)
    assert "rollout_corr/rollout_is_mean" not in plain

    weighted = step("weighted", f"{RULE}.rollout_is=token", f"{RULE}.rollout_is_threshold=1.5")
    assert weighted["rollout_corr/rollout_is_max"] == 1.5
    assert weighted["rollout_corr/rollout_is_min"] < 1
    assert weighted["rollout_corr/kl"] == plain["rollout_corr/kl"]
    assert weighted["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-3)
    normalised = step("normalised", f"{RULE}.rollout_is=sequence", f"{RULE}.rollout_is_batch_normalize=True")
    assert normalised["rollout_corr/rollout_is_min"] >= 0

    rejected = step("rejected", f"{RULE}.rollout_rs=[seq_mean_k1]", f"{RULE}.rollout_rs_threshold=1.3")
    share = rejected["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert 0 < share < 1
    # Scores and lengths count all samples, rejected ones too.
    for name in ("critic/score/mean", "critic/score/min", "response_length/mean", "actor/entropy"):
        assert rejected[name] == plain[name]
    assert rejected["critic/advantages/max"] != plain["critic/advantages/max"]


def test_a_batch_that_is_rejected_as_a_whole(step):
    """Field report: with rejection and micro-batches of one sample the run raises (verl issue 6485)."""
    static = [
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    ]
    rule = [f"{RULE}.rollout_rs=[seq_max_k2]", f"{RULE}.rollout_rs_threshold=1e-9", f"{RULE}.rollout_is=token"]
    out = step("run", *static, *rule)
    assert out["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert out["actor/pg_loss"] == out["actor/grad_norm"] == 0
    assert out["critic/score/max"] > 0
    assert "critic/advantages/mean" not in out


def test_bypass_mode_saves_the_pass(step):
    plain = step("plain", f"{ACTOR}.ppo_mini_batch_size=8")
    bypass = [f"{RULE}.bypass_mode=True", f"{ACTOR}.ppo_mini_batch_size=8"]
    clip = step("clip", *bypass)
    assert not {"timing_s/old_log_prob", "actor/entropy", "rollout_corr/kl"} & clip.keys()
    # On-policy the trainer's ratio is 1; against the engine it is not.
    assert plain["actor/pg_clipfrac"] == 0
    assert clip["actor/pg_clipfrac"] > 0
    assert clip["actor/ppo_kl"] == pytest.approx(plain["rollout_corr/kl"], rel=1e-3)

    reinforce = step("reinforce", *bypass, f"{RULE}.loss_type=reinforce")
    weighted = step("weighted", *bypass, f"{RULE}.loss_type=reinforce", f"{RULE}.rollout_is=token")
    # At ratio 1 the clipped loss has the gradient of the plain policy gradient, which does not look at the engine.
    assert reinforce["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert len({out["actor/grad_norm"] for out in (reinforce, clip, weighted)}) == 3
    assert "timing_s/old_log_prob" not in weighted

    kept = step("kept", *bypass, f"{RULE}.rollout_rs=[seq_mean_k1]", f"{RULE}.rollout_rs_threshold=1.3")
    assert "timing_s/old_log_prob" in kept  # rejection needs the trainer's log-probs before advantages
    assert 0 < kept["rollout_corr/rollout_rs_seq_masked_fraction"] < 1
    assert kept["actor/grad_norm"] != clip["actor/grad_norm"]


def test_an_engine_that_agrees_is_bypassed_without_a_difference(inputs: Inputs, tmp_path: Path):
    """The log-probs of native are the trainer's, so leaving out the pass changes nothing but rounding."""
    found = []
    for name, more in (("with", []), ("without", [f"{RULE}.bypass_mode=True"])):
        overrides = inputs.overrides(
            tmp_path / name, "reward.num_workers=1", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", *more
        )
        assert train_here(overrides) == 0
        found.append(metrics(tmp_path / name)[0])
    assert found[0]["actor/pg_loss"] == pytest.approx(found[1]["actor/pg_loss"], abs=1e-5)
    assert found[0]["actor/grad_norm"] == pytest.approx(found[1]["actor/grad_norm"], rel=1e-4)
    assert "actor/entropy" in found[0]
    assert "actor/entropy" not in found[1]


def test_every_mode_trains_with_the_optimal_token_baseline(inputs: Inputs, tmp_path: Path):
    """It reads Σ π² and the importance weights, so it makes the pass also under bypass_mode."""
    for name, more in (("is", [f"{RULE}.rollout_is=token"]), ("bypass", [f"{RULE}.bypass_mode=True"])):
        overrides = inputs.overrides(
            tmp_path / name,
            "reward.num_workers=1",
            "algorithm.adv_estimator=optimal_token_baseline",
            f"{ROLLOUT}.n=2",
            *more,
        )
        assert train_here(overrides) == 0
        assert "timing_s/old_log_prob" in metrics(tmp_path / name)[0]
