"""critic.*: the value model and its update."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from corral.config.schema.fsdp import TrainedFsdp
from corral.config.schema.model import CriticModel
from corral.config.schema.optim import Optim
from corral.config.section import Section, key, section

_ACTOR = "actor_rollout_ref.actor"


@dataclass
class Critic(Section):
    enable: bool | None = key(None, "Build a critic; null: when the advantage estimator needs one.")
    strategy: str = key(II(f"{_ACTOR}.strategy"), "How the model is sharded; default: as the actor.")
    model: CriticModel = section(CriticModel, "Weights the critic starts from; a value head is added.")
    optim: Optim = section(Optim, "Optimizer of the critic.", lr=1e-5)
    fsdp: TrainedFsdp = section(TrainedFsdp, "How the critic is held.")
    ppo_mini_batch_size: int = key(
        II(f"{_ACTOR}.ppo_mini_batch_size"), "Prompts per optimizer step; default: as the actor.", "prompts"
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward/backward of one rank; needed when use_dynamic_bsz is False.", "samples"
    )
    ppo_infer_micro_batch_size_per_gpu: int | None = key(
        II(".ppo_micro_batch_size_per_gpu"), "Samples per forward when values are computed.", "samples"
    )
    use_dynamic_bsz: bool = key(
        II(f"{_ACTOR}.use_dynamic_bsz"), "Cut micro-batches by a token budget; default: as the actor."
    )
    ppo_max_token_len_per_gpu: int = key(32768, "Token budget of one training micro-batch, per device.", "tokens")
    ppo_infer_max_token_len_per_gpu: int = key(32768, "Token budget when values are computed, per device.", "tokens")
    ulysses_sequence_parallel_size: int = key(1, "Ranks that share one sequence (SP degree).", "ranks")
    ppo_epochs: int = key(II(f"{_ACTOR}.ppo_epochs"), "Passes over the samples; default: as the actor.")
    shuffle: bool = key(II(f"{_ACTOR}.shuffle"), "Random mini-batch order; default: as the actor.")
    data_loader_seed: int = key(II(f"{_ACTOR}.data_loader_seed"), "Seed of that order; default: as the actor.")
    cliprange_value: float = key(0.5, "A new value is clipped to the old one ± this.")
    loss_agg_mode: str = key(II(f"{_ACTOR}.loss_agg_mode"), "Loss aggregation; default: as the actor.")
    loss_scale_factor: float | None = key(
        II(f"{_ACTOR}.loss_scale_factor"), "Divisor of seq-mean-token-sum-norm; default: as the actor.", "tokens"
    )
