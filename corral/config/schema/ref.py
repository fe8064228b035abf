"""actor_rollout_ref.ref.*: the frozen reference model; built when a KL term needs it."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from corral.config.schema.fsdp import Fsdp
from corral.config.section import Section, key, section

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Ref(Section):
    fsdp_config: Fsdp = section(
        Fsdp,
        "How the reference is held; its types are the actor's, so that the KL is not a difference of precision.",
        model_dtype=II(f"{_ACTOR}.fsdp_config.model_dtype"),
        dtype=II(f"{_ACTOR}.fsdp_config.dtype"),
    )
    ulysses_sequence_parallel_size: int = key(
        II(f"{_ACTOR}.ulysses_sequence_parallel_size"), "SP degree; default: as the actor.", "ranks"
    )
    log_prob_use_dynamic_bsz: bool = key(
        II(f"{_ACTOR}.use_dynamic_bsz"), "Cut micro-batches by a token budget; default: as the actor."
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        II(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        "Samples per forward; default: as the rollout's.",
        "samples",
    )
    log_prob_max_token_len_per_gpu: int = key(
        II(f"{_ACTOR}.ppo_max_token_len_per_gpu"), "Token budget, per device; default: as the actor.", "tokens"
    )
