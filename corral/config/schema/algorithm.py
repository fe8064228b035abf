"""algorithm.*: how rewards become advantages."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.config.section import Section, key, section


@dataclass
class KlControl(Section):
    type: str = key("fixed", "How the coefficient of the KL penalty in the reward moves: fixed, adaptive.")
    kl_coef: float = key(0.001, "Coefficient of the KL penalty in the reward; adaptive: its first value.")
    horizon: int = key(10000, "adaptive: how slowly the coefficient follows.", "samples")
    target_kl: float = key(0.1, "adaptive: the KL it steers to.")


@dataclass
class FilterGroups(Section):
    enable: bool = key(False, "Dynamic sampling: drop prompts whose samples all score alike and generate for others.")
    metric: str | None = key(
        None, "What has to vary: score (also reward), or a value that the scorer returns beside it, such as acc."
    )
    max_num_gen_batches: int = key(0, "Generation batches of one iteration before it gives up; 0: no limit.", "batches")


@dataclass
class PfPpo(Section):
    reweight_method: str = key("pow", "Weights of the resampling: pow, max_min, max_random.")
    weight_pow: float = key(2.0, "pow: the weight is the size of the score to this power.")


@dataclass
class RolloutCorrection(Section):
    rollout_is: str | None = key(
        None, "Importance weights for engine and trainer disagreeing: null (none), token, sequence."
    )
    rollout_is_threshold: Any = key(
        2.0, "A number: larger weights are cut to it. low_high, such as 0.5_2: weights outside become zero."
    )
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean over the batch.")
    rollout_rs: Any = key(
        None, "Criteria that reject tokens (token_k1, _k2, _k3) or samples (seq_sum_k1, seq_mean_k3, seq_max_k2, ...)."
    )
    rollout_rs_threshold: Any = key(
        None, "One for all criteria or one each. k1: a ratio band low_high, or one number u for 1/u_u; else a maximum."
    )
    bypass_mode: bool = key(False, "Take the engine's log-probs as the old ones; the trainer computes none.")
    loss_type: str = key("ppo_clip", "Policy loss of bypass_mode: ppo_clip, reinforce.")


@dataclass
class Algorithm(Section):
    adv_estimator: str = key(
        "gae",
        "Advantage estimator: gae (has a critic), grpo, grpo_passk, gdpo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, rloo, opo, remax, gpg, optimal_token_baseline, tir_optimal_token_baseline; or "
        "your own as file.py:function or package.module:function.",
    )
    gamma: float = key(1.0, "Discount factor, in [0, 1].")
    lam: float = key(1.0, "GAE trade-off between bias and variance, in [0, 1].")
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's standard deviation; False: Dr. GRPO.")
    use_kl_in_reward: bool = key(False, "Subtract a KL penalty against the reference model from the token rewards.")
    kl_penalty: str = key(
        "kl", "Estimator of that KL: kl (k1), abs, mse (k2), low_var_kl (k3); a trailing + takes its gradient from k2."
    )
    kl_ctrl: KlControl = section(KlControl, "Coefficient of the KL penalty in the reward.")
    gdpo_reward_keys: list[str] | None = key(None, "gdpo: the values of the scorer that are rewards of their own.")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: one weight for each of them; null: 1 each.")
    filter_groups: FilterGroups = section(FilterGroups, "Dynamic sampling.")
    use_pf_ppo: bool = key(False, "Resample the samples of an iteration after their advantages are known (gae only).")
    pf_ppo: PfPpo = section(PfPpo, "How they are resampled.")
    rollout_correction: RolloutCorrection = section(
        RolloutCorrection, "What is done about engine and trainer disagreeing on log-probs."
    )
