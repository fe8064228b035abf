"""actor_rollout_ref.actor.*: the policy update."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from corral.config.schema.fsdp import TrainedFsdp
from corral.config.schema.optim import Optim
from corral.config.section import Section, key, section


@dataclass
class PolicyLoss(Section):
    loss_mode: str = key(
        "vanilla",
        "Policy loss: vanilla (clipped PPO with the dual clip), dppo_tv, dppo_kl, gspo, sapo, gpg, clip_cov, kl_cov, "
        "geo_mean, dro, cispo; or your own as file.py:function or package.module:function. "
        "rollout_correction.bypass_mode brings its own.",
    )
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of the mini-batch's tokens that lose their gradient.")
    clip_cov_lb: float = key(1.0, "clip_cov: covariance from which a token may be picked.")
    clip_cov_ub: float = key(5.0, "clip_cov: covariance up to which a token may be picked.")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of the mini-batch's tokens, by covariance, that are penalised.")
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty.")
    dro_beta: float | None = key(None, "dro: weight of its quadratic term, above 0.")


@dataclass
class Checkpoint(Section):
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds, of actor and critic: model, optimizer and extra, which resuming takes all three of; "
        "hf_model, a model folder that transformers loads.",
    )


@dataclass
class Actor(Section):
    strategy: str = key("fsdp", "How the model is sharded: fsdp and fsdp2 both mean FSDP2.")
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step, over all ranks.", "prompts")
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward/backward of one rank; needed when use_dynamic_bsz is False.", "samples"
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by a token budget instead of a sample count.")
    ppo_max_token_len_per_gpu: int = key(
        16384, "Token budget of one micro-batch, per device; a packed row holds this × the SP degree.", "tokens"
    )
    ulysses_sequence_parallel_size: int = key(1, "Ranks that share one sequence (SP degree).", "ranks")
    ppo_epochs: int = key(1, "Passes over the samples of an iteration.")
    shuffle: bool = key(False, "Draw the mini-batches of each pass in a random order.")
    data_loader_seed: int = key(42, "Seed of that order, and of the tokens that clip_cov picks.")
    policy_loss: PolicyLoss = section(PolicyLoss, "Which policy loss.")
    clip_ratio_low: float = key(0.2, "The ratio is clipped below at 1 - this.")
    clip_ratio_high: float = key(0.2, "The ratio is clipped above at 1 + this.")
    clip_ratio_c: float = key(3.0, "Dual clip: bound of the loss for negative advantages, above 1.")
    tau_pos: float = key(1.0, "sapo: temperature of the gate for positive advantages.")
    tau_neg: float = key(1.05, "sapo: temperature of the gate for the others.")
    loss_agg_mode: str = key(
        "token-mean",
        "How token losses become one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, "
        "seq-mean-token-mean.",
    )
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null: data.max_response_length.", "tokens"
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = key(False, "Report the entropy of the update even when entropy_coeff is 0.")
    calculate_sum_pi_squared: bool = key(
        False, "Compute the sum of squared probabilities of each token also for an estimator of your own."
    )
    use_kl_loss: bool = key(False, "Add the KL divergence from the reference model to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of that KL.")
    kl_loss_type: str = key("low_var_kl", "Its estimator; names as algorithm.kl_penalty.")
    optim: Optim = section(Optim, "Optimizer of the actor.")
    fsdp_config: TrainedFsdp = section(TrainedFsdp, "How the actor is held.")
    checkpoint: Checkpoint = section(Checkpoint, "What is saved.")
