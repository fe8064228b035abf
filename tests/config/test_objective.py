"""Estimators, losses, resampling and rollout correction: what a plan makes of them, and what it refuses."""

from __future__ import annotations

import json

import pytest

from corral.config import names
from corral.config.plan import PFPPO, FilterGroups, Rejection
from corral.config.show import as_json, render
from corral.errors import ConfigError

ARR = "actor_rollout_ref"
ACTOR = f"{ARR}.actor"
LOSS = f"{ACTOR}.policy_loss"
N = f"{ARR}.rollout.n"
ESTIMATOR = "algorithm.adv_estimator"
CORRECTION = "algorithm.rollout_correction"
GDPO = [f"{ESTIMATOR}=gdpo", f"{N}=2"]
GROUPS = [name for name, facts in names.ESTIMATORS.items() if facts.groups]


def keys_for(estimator: str) -> list[str]:
    return [f"{ESTIMATOR}={estimator}", f"{N}=4", "algorithm.gdpo_reward_keys=[acc,format]"]


@pytest.mark.parametrize("estimator", [*names.ESTIMATORS, *names.ESTIMATOR_ALIASES])
def test_every_estimator_has_a_plan(plan_of, estimator):
    plan = plan_of(*keys_for(estimator), f"critic.ppo_mini_batch_size={8 if estimator == 'gae' else 5}")
    assert plan.algorithm.adv_estimator == names.estimator(estimator)
    assert (plan.critic is not None) == (plan.critic_update is not None) == (estimator == "gae")
    assert plan.algorithm.sum_pi_squared == estimator.endswith("optimal_token_baseline")
    assert render(plan)
    assert json.loads(as_json(plan))


@pytest.mark.parametrize("estimator", [*GROUPS, *names.ESTIMATOR_ALIASES])
def test_estimators_of_groups_refuse_one_sample(plan_of, estimator):
    with pytest.raises(ConfigError, match=rf"{estimator} .*{N}=1 gives it one; set {N} to 2 or more"):
        plan_of(*keys_for(estimator), f"{N}=1")


def test_the_others_take_one_sample(plan_of):
    assert set(names.ESTIMATORS) - set(GROUPS) == {"gae", "reinforce_plus_plus", "remax"}
    for estimator in ("reinforce_plus_plus", "remax"):
        assert plan_of(f"{ESTIMATOR}={estimator}").samples_per_step == 16


def test_remax_says_what_its_baselines_cost(plan_of):
    (notice,) = plan_of(f"{ESTIMATOR}=remax", f"{N}=2").notices
    assert "16 greedy responses" in notice
    assert "32 samples" in notice


@pytest.mark.parametrize("loss", names.LOSSES)
def test_every_loss_has_a_plan(plan_of, loss):
    keys = [f"{CORRECTION}.bypass_mode=True"] if loss == "bypass_mode" else [f"{LOSS}.loss_mode={loss}"]
    update = plan_of(*keys, f"{LOSS}.dro_beta=0.5").actor_update
    assert update.loss_mode == loss
    assert update.loss_agg_mode == (names.LOSSES[loss].aggregation or "token-mean")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([f"{ESTIMATOR}=grp"], ["grp is unknown", "'grpo'"]),
        ([f"{ESTIMATOR}=rloo_vectorised", f"{N}=2"], ["'rloo_vectorized'"]),
        ([f"{LOSS}.loss_mode=gsp"], ["gsp is unknown", "'gspo'"]),
        ([f"{LOSS}.loss_mode=kl-cv"], ["'kl_cov'"]),
        ([f"{ESTIMATOR}=mine.py:fn"], [f"{ESTIMATOR}=mine.py:fn", "mine.py is not a file"]),
        ([f"{ESTIMATOR}=my.module:"], ["file.py:function"]),
        ([f"{LOSS}.loss_mode=not-a-module:fn"], ["file.py:function"]),
        (GDPO, ["algorithm.gdpo_reward_keys", "[acc,format]"]),
        ([*GDPO, "algorithm.gdpo_reward_keys=[acc,acc]"], ["twice"]),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"], ["1 numbers for 2"]),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_weights=[inf]"], ["finite"]),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.use_kl_in_reward=True"], ["use_kl_loss=True instead"]),
        (["algorithm.gdpo_reward_keys=acc"], ["list", "'algorithm.gdpo_reward_keys=[acc]'"]),
        (["critic.enable=True", f"{ESTIMATOR}=grpo", f"{N}=2"], ["critic.enable=True", "reads no values"]),
        (["algorithm.use_pf_ppo=True", f"{ESTIMATOR}=rloo", f"{N}=2"], ["use_pf_ppo=True", "gae only"]),
        (["algorithm.pf_ppo.reweight_method=power"], ["'pow'"]),
        (["algorithm.pf_ppo.weight_pow=-1"], ["weight_pow=-1", "at least 0"]),
        (["algorithm.filter_groups.enable=True"], [f"{N}=1", "2 or more"]),
        (["algorithm.filter_groups.enable=True", f"{N}=2"], ["filter_groups.metric", "score, reward"]),
        (
            [
                "algorithm.filter_groups.enable=True",
                "algorithm.filter_groups.metric=seq_final_reward",
                "algorithm.use_kl_in_reward=True",
                f"{N}=2",
            ],
            ["metric=seq_final_reward", "use_kl_in_reward=True", "to score"],
        ),
        (
            [
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.horizon=2",
                "data.train_batch_size=16",
                f"{ACTOR}.ppo_mini_batch_size=16",
            ],
            ["horizon=2", "16 samples", "set 4 or more"],
        ),
        (["algorithm.filter_groups.max_num_gen_batches=-1"], ["max_num_gen_batches=-1"]),
        (["algorithm.filter_groups.max_inflight_gen_batches=2"], ["not available in this version"]),
        ([f"{LOSS}.loss_mode=dro"], ["dro_beta", "above 0"]),
        ([f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0"], ["dro_beta=0", "above 0"]),
        ([f"{LOSS}.clip_cov_lb=5", f"{LOSS}.clip_cov_ub=1"], ["clip_cov_lb=5", "smaller"]),
        ([f"{LOSS}.kl_cov_ratio=1.5"], ["kl_cov_ratio=1.5", "between 0 and 1"]),
        ([f"{ACTOR}.tau_pos=0"], ["tau_pos=0", "above 0"]),
        ([f"{LOSS}.loss_mode=bypass_mode"], ["bypass_mode=True", "set that instead"]),
        ([f"{LOSS}.loss_mode=gspo", f"{CORRECTION}.bypass_mode=True"], ["gspo", "loss_type", "leave out"]),
        ([f"{CORRECTION}.rollout_is=seq"], ["'sequence'"]),
        ([f"{CORRECTION}.loss_type=ppo"], ["'ppo_clip'"]),
        ([f"{CORRECTION}.rollout_rs=token_k1"], ["rollout_rs_threshold", "0.5_2"]),
        ([f"{CORRECTION}.rollout_rs=seq_max_k1", f"{CORRECTION}.rollout_rs_threshold=2"], ["'seq_max_k"]),
        ([f"{CORRECTION}.rollout_rs=[token_k2,token_k2]", f"{CORRECTION}.rollout_rs_threshold=2"], ["twice"]),
        (
            [f"{CORRECTION}.rollout_rs=[token_k1,token_k2,seq_sum_k2]", f"{CORRECTION}.rollout_rs_threshold=[2,1]"],
            ["2 values for 3 criteria"],
        ),
        ([f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=0.1_2"], ["one number"]),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5"], ["1/u to u", "above 1"]),
        ([f"{CORRECTION}.rollout_is_threshold=2_0.5"], ["empty", "lower bound first"]),
        ([f"{CORRECTION}.rollout_is_threshold=0"], ["above 0"]),
        ([f"{CORRECTION}.rollout_is_threshold=1_2_3"], ["1_2_3", "low_high"]),
        ([f"{CORRECTION}.rollout_is_threshold=many"], ["many", "low_high"]),
    ],
    ids=lambda value: "+".join(value)[:70] if isinstance(value, list) else None,
)
def test_refused(plan_of, keys, said):
    with pytest.raises(ConfigError) as caught:
        plan_of(*keys)
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in said if part not in line] == []


def test_a_function_of_the_user(plan_of, files, monkeypatch):
    (files / "mine.py").write_text("raise RuntimeError('a plan runs nobody\\'s code')")
    monkeypatch.chdir(files)
    plan = plan_of(
        f"{ESTIMATOR}=mine.py:estimate", f"{LOSS}.loss_mode=my.losses:loss", f"{ACTOR}.calculate_sum_pi_squared=True"
    )
    assert plan.algorithm.adv_estimator == f"{files}/mine.py:estimate"
    assert plan.actor_update.loss_mode == "my.losses:loss"
    assert plan.critic is None
    assert plan.algorithm.sum_pi_squared
    assert plan_of(f"{ESTIMATOR}=mine.py:estimate", "critic.enable=True").critic is not None


def test_resampling_and_filtering(plan_of):
    assert plan_of().algorithm.pf_ppo is None
    plan = plan_of("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=3", "data.seed=7")
    assert (plan.algorithm.pf_ppo, plan.algorithm.seed) == (PFPPO("pow", 3.0), 7)
    keys = ["algorithm.filter_groups.enable=True", f"{N}=2", "algorithm.filter_groups.max_num_gen_batches=5"]
    for metric, meant in {"acc": "acc", "seq_reward": "score", "seq_final_reward": "reward"}.items():
        filtering = plan_of(*keys, f"algorithm.filter_groups.metric={metric}").algorithm.filter_groups
        assert filtering == FilterGroups(meant, 5)


def test_gdpo_weights(plan_of):
    given = plan_of(*GDPO, "algorithm.gdpo_reward_keys=[a,b]").algorithm
    assert (given.gdpo_reward_keys, given.gdpo_reward_weights) == (("a", "b"), (1.0, 1.0))
    own = plan_of(*GDPO, "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[0.25,2]").algorithm
    assert own.gdpo_reward_weights == (0.25, 2.0)


def test_adaptive_kl(plan_of):
    keys = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=500"]
    control = plan_of(*keys, "algorithm.kl_ctrl.target_kl=0.05").algorithm.kl_ctrl
    assert (control.type, control.kl_coef, control.horizon, control.target_kl) == ("adaptive", 0.001, 500, 0.05)


def test_critic_warm_up_needs_a_critic(plan_of):
    assert plan_of("trainer.critic_warmup=3").trainer.critic_warmup == 3
    plan = plan_of("trainer.critic_warmup=3", f"{ESTIMATOR}=grpo", f"{N}=2")
    assert plan.trainer.critic_warmup == 0
    assert "no critic" in {item.key: item.reason for item in plan.unused}["trainer.critic_warmup"]


@pytest.mark.parametrize(
    ("written", "lower", "upper"),
    [("2", None, 2.0), ("3.5", None, 3.5), ("0.5_5.0", 0.5, 5.0), ("0.5_2", 0.5, 2.0), ("1_2", 1.0, 2.0),
     ("'0.5_2'", 0.5, 2.0), ('"0.5_2"', 0.5, 2.0), ("1e-3_1e3", 1e-3, 1e3)],
)  # fmt: skip
def test_a_band_is_read_as_written(plan_of, written, lower, upper):
    """Python and Hydra take an underscore between digits for nothing: 0.5_2 would be 0.52, and 1_2 twelve."""
    rule = plan_of(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold={written}")
    assert rule.algorithm.rollout_correction is not None
    assert (rule.algorithm.rollout_correction.lower, rule.algorithm.rollout_correction.upper) == (lower, upper)


@pytest.mark.parametrize(
    ("criteria", "thresholds", "meant"),
    [
        ("token_k1", "2", [("token_k1", 0.5, 2.0)]),
        ("token_k1", "0.5_3", [("token_k1", 0.5, 3.0)]),
        ('"token_k2, seq_max_k3"', "0.1", [("token_k2", None, 0.1), ("seq_max_k3", None, 0.1)]),
        ("[seq_mean_k1,token_k3]", "[0.25_4,2]", [("seq_mean_k1", 0.25, 4.0), ("token_k3", None, 2.0)]),
        ("[seq_sum_k1,token_k1]", '"0.5_2,4"', [("seq_sum_k1", 0.5, 2.0), ("token_k1", 0.25, 4.0)]),
    ],
)
def test_rejections(plan_of, criteria, thresholds, meant):
    plan = plan_of(f"{CORRECTION}.rollout_rs={criteria}", f"{CORRECTION}.rollout_rs_threshold={thresholds}")
    assert plan.algorithm.rollout_correction is not None
    assert plan.algorithm.rollout_correction.rejections == tuple(Rejection(*rule) for rule in meant)


def test_no_correction_unless_asked_for(plan_of):
    assert plan_of().algorithm.rollout_correction is None
    bypass = plan_of(f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce").algorithm
    assert bypass.rollout_correction is not None
    assert (bypass.rollout_correction.bypass_mode, bypass.rollout_correction.loss_type) == (True, "reinforce")


@pytest.mark.parametrize(
    ("keys", "key", "word"),
    [
        ([f"{ESTIMATOR}=grpo", f"{N}=2", "algorithm.lam=0.9"], "algorithm.lam", "grpo does not read it"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "algorithm.norm_adv_by_std_in_grpo", "gae"),
        ([f"{ESTIMATOR}=grpo", f"{N}=2", "critic.optim.lr=1e-4"], "critic.optim.lr", "no critic"),
        (["critic.enable=True"], "critic.enable", "gae decides"),
        ([f"{LOSS}.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=2"], f"{ACTOR}.clip_ratio_c", "gspo"),
        ([f"{ACTOR}.tau_pos=2"], f"{ACTOR}.tau_pos", "vanilla"),
        (
            [f"{LOSS}.loss_mode=sapo", f"{ACTOR}.loss_agg_mode=token-sum", "critic.loss_agg_mode=token-mean"],
            f"{ACTOR}.loss_agg_mode",
            "always a seq-mean-token-mean",
        ),
        (["algorithm.pf_ppo.weight_pow=3"], "algorithm.pf_ppo.weight_pow", "use_pf_ppo=False"),
        (["algorithm.filter_groups.metric=acc"], "algorithm.filter_groups.metric", "enable=False"),
        ([f"{CORRECTION}.rollout_is_threshold=3"], f"{CORRECTION}.rollout_is_threshold", "rollout_is is not set"),
        ([f"{CORRECTION}.rollout_rs_threshold=3"], f"{CORRECTION}.rollout_rs_threshold", "rollout_rs is not set"),
        ([f"{CORRECTION}.loss_type=reinforce"], f"{CORRECTION}.loss_type", "bypass_mode=False"),
        (
            [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"],
            f"{CORRECTION}.rollout_is",
            "clips the ratio",
        ),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.horizon=5"],
            "algorithm.kl_ctrl.horizon",
            "does not adapt",
        ),
    ],
    ids=lambda value: "+".join(value)[:70] if isinstance(value, list) else None,
)
def test_set_but_not_applicable(plan_of, keys, key, word):
    found = {item.key: item.reason for item in plan_of(*keys).unused}
    assert word in found[key]


def test_a_key_that_the_critic_inherits_counts(plan_of):
    """The policy loss brings its own aggregation; the critic takes the actor's key."""
    plan = plan_of(f"{LOSS}.loss_mode=sapo", f"{ACTOR}.loss_agg_mode=token-sum")
    assert f"{ACTOR}.loss_agg_mode" not in {item.key for item in plan.unused}
    assert plan.critic_update is not None
    assert plan.critic_update.loss_agg_mode == "token-sum"


def test_the_seed_of_clip_cov_counts(plan_of):
    key = f"{ACTOR}.data_loader_seed"
    plan = plan_of(f"{key}=5", f"{LOSS}.loss_mode=clip_cov")
    assert plan.actor_update.selection_seed == 5
    assert key not in {item.key for item in plan.unused}


@pytest.mark.parametrize(
    ("keys", "notice"),
    [
        ([f"{ESTIMATOR}=grpo_vectorized", f"{N}=2"], f"{ESTIMATOR}=grpo_vectorized is read as grpo"),
        ([f"{LOSS}.loss_mode=clip-cov"], f"{LOSS}.loss_mode=clip-cov is read as clip_cov"),
        ([f"{LOSS}.loss_mode=kl-cov"], f"{LOSS}.loss_mode=kl-cov is read as kl_cov"),
        (["critic.grad_clip=0.5"], "critic.grad_clip is read as critic.optim.clip_grad"),
        (
            ["custom_reward_function.name=mine"],
            "custom_reward_function.name is read as reward.custom_reward_function.name",
        ),
        (
            [f"{ACTOR}.clip_ratio=0.1"],
            f"{ACTOR}.clip_ratio is read as {ACTOR}.clip_ratio_low and {ACTOR}.clip_ratio_high",
        ),
    ],
)
def test_other_spellings_are_a_notice(plan_of, keys, notice):
    assert plan_of(*keys).notices == (notice,)


def test_the_plan_shows_the_mathematics(plan_of):
    text = render(
        plan_of(
            *GDPO,
            "algorithm.gdpo_reward_keys=[acc,format]",
            "algorithm.gdpo_reward_weights=[1,0.5]",
            "algorithm.norm_adv_by_std_in_grpo=False",
            f"{CORRECTION}.rollout_is=sequence",
            f"{CORRECTION}.rollout_is_threshold=0.5_2",
            f"{CORRECTION}.rollout_rs=[seq_mean_k1,token_k2]",
            f"{CORRECTION}.rollout_rs_threshold=[4,0.1]",
            f"{LOSS}.loss_mode=gspo",
        )
    )
    for part in (
        "gdpo, not divided by the standard deviation, 1 × acc + 0.5 × format",
        "weights by sequence, zero outside 0.5 to 2; seq_mean_k1 0.25 to 4; token_k2 up to 0.1",
        "gspo, seq-mean-token-mean",
    ):
        assert part in text
    assert "gamma" not in text
