"""actor_rollout_ref.model.* and critic.model.*: the weights a role starts from."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from corral.config.section import Section, key


@dataclass
class Model(Section):
    path: str | None = key(None, "Folder of a transformers causal language model.")
    tokenizer_path: str | None = key(None, "Folder of the tokenizer; null: the model's folder.")
    trust_remote_code: bool = key(False, "Run Python code that the model folder carries.")
    override_config: dict[str, Any] = key({}, "Values that replace those of the model's config.json.")
    use_remove_padding: bool = key(True, "Pack samples without padding. Rows are always packed: only True is accepted.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in backward to save memory.")
    fused_modules: bool = key(True, "On npu: RMSNorm, SwiGLU and rotary embedding by its fused kernels.")


@dataclass
class CriticModel(Model):
    path: str | None = key(II("actor_rollout_ref.model.path"), "Folder of the model; default: the actor's.")
    tokenizer_path: str | None = key(
        II("actor_rollout_ref.model.tokenizer_path"), "Folder of the tokenizer; default: the actor's."
    )
    trust_remote_code: bool = key(
        II("actor_rollout_ref.model.trust_remote_code"), "Run Python code that the model folder carries."
    )
