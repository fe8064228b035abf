"""Builds the transformers model of an engine: a causal language model, or a value model with one output per token.

Anything about the model folder that cannot work is reported here in one line, before training starts.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from corral.config.plan import EnginePlan
from corral.engine.attention import ATTENTION
from corral.engine.distributed import device_of
from corral.engine.norm import use_full_precision_norms
from corral.engine.npu_modules import use_fused_modules
from corral.engine.rank import Rank
from corral.errors import ConfigError, DataError

_HEAD = "score."
# Modules that mix neighbouring tokens of a row without asking the attention interface, by part of their class name.
_MIXERS = ("mamba", "ssm", "deltanet", "linearattention", "lightningattention", "rwkv", "rglru", "hyena")


def build_model(plan: EnginePlan, rank: Rank) -> PreTrainedModel:
    """The model of `plan` on the CPU of this rank, parameters in the master dtype, not sharded.

    A critic whose folder holds a causal LM gets a value head drawn from plan.seed, the same on every rank.
    DataError: the folder is missing, is not a model, or lacks weights. ConfigError: the model or an override cannot
    be used.
    """
    folder, key = Path(plan.model.path), model_key(plan.role)
    config = _read_config(folder, key, plan)
    refuse_config(config, training=plan.train is not None)
    heads = config.get_text_config().num_attention_heads
    if heads % plan.sp:
        raise ConfigError(
            f"{plan.role}: {heads} attention heads cannot be split over sequence parallel degree {plan.sp}"
        )
    auto = AutoModelForCausalLM
    if plan.role == "critic":
        auto = AutoModelForTokenClassification
        config.num_labels, config.classifier_dropout = 1, 0.0
    model = _load(auto, folder, key, config, plan)
    refuse_modules(model, training=plan.train is not None)
    if plan.model.gradient_checkpointing and plan.train is not None:
        checkpoint_layers(model)
    if plan.compute_dtype == "float64":
        use_full_precision_norms(model)
    if plan.model.fused_modules:
        use_fused_modules(model, device_of(rank))
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep the inputs of layers alone, and compute the rest again in the backward pass."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in transformers from 5.23 on
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def model_key(role: str) -> str:
    """The configuration key that names the model folder of a role."""
    return "critic.model.path" if role == "critic" else "actor_rollout_ref.model.path"


def _read_config(folder: Path, key: str, plan: EnginePlan) -> PreTrainedConfig:
    file = folder / "config.json"
    if not folder.is_dir():
        raise DataError(f"{key}: model folder {folder} does not exist; download the model there or give another folder")
    if not file.is_file():
        raise DataError(f"{key}: {folder} has no config.json, so it is not a transformers model folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{key}: {file} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise DataError(f"{key}: {file} names no model_type, so it is not the config of a transformers model")
    overrides = dict(plan.model.override_config)
    if "attn_implementation" in overrides:
        raise ConfigError("override_config.attn_implementation cannot be set: attention is always Corral's own")
    try:
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=plan.model.trust_remote_code, return_unused_kwargs=True, **overrides
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{key}: transformers cannot read {file}: {_one_line(error)}") from error
    for name in unused:
        near = difflib.get_close_matches(name, list(config.to_dict()), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"override_config.{name} is not a field of {type(config).__name__}{hint}")
    return config


def _load(auto: Any, folder: Path, key: str, config: PreTrainedConfig, plan: EnginePlan) -> PreTrainedModel:
    """The model with its weights; DataError when some are missing (other than a value head)."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, plan.master_dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=plan.model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise DataError(f"{key}: transformers cannot load {folder}: {_one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(level)
    missing = sorted(info["missing_keys"])
    head = [name for name in missing if plan.role == "critic" and name.startswith(_HEAD)]
    lost = [name for name in missing if name not in head] + sorted(str(x) for x in info["mismatched_keys"])
    if lost:
        raise DataError(f"{key}: {folder} lacks {len(lost)} weights of {type(model).__name__}, the first is {lost[0]}")
    if head:
        _init_head(model.score, plan.seed, config.get_text_config().initializer_range)
    return model


@torch.no_grad()
def _init_head(head: nn.Linear, seed: int, std: float) -> None:
    """A value head drawn in float64 on the CPU, so it is the same for every rank, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    head.weight.copy_(torch.empty_like(head.weight, dtype=torch.float64).normal_(0.0, std, generator=generator))
    if head.bias is not None:
        head.bias.zero_()


def refuse_config(config: PreTrainedConfig, *, training: bool) -> None:
    """ConfigError naming the first thing in a model's configuration that packed attention does not implement."""
    text, name = config.get_text_config(), config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model type {name} is an encoder-decoder; only causal language models can be trained")
    for kind in getattr(text, "layer_types", None) or ():
        if kind != "full_attention":
            raise ConfigError(f"model type {name} has {kind} layers; only full_attention is implemented")
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True):
        raise ConfigError(f"model type {name} uses sliding_window={window}, which packed attention does not implement")
    softcap = getattr(text, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ConfigError(
            f"model type {name} has attn_logit_softcapping={softcap}, which packed attention does not implement"
        )
    if training and getattr(text, "attention_dropout", None):
        raise ConfigError(
            f"model type {name} has attention_dropout={text.attention_dropout}: results would depend on how samples "
            "are packed; set override_config.attention_dropout=0"
        )


def refuse_modules(model: PreTrainedModel, *, training: bool) -> None:
    """ConfigError naming the first module that mixes tokens outside attention, or drops out in training."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{type(model).__name__} does not take its attention from transformers' attention interface")
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Conv1d | nn.RNNBase) or any(part in kind.lower() for part in _MIXERS):
            raise ConfigError(f"{type(model).__name__} mixes tokens outside attention ({path}: {kind})")
        if training and isinstance(module, nn.Dropout) and module.p > 0:
            raise ConfigError(
                f"{type(model).__name__}: {path} drops out with p={module.p}; results would depend on how samples are "
                "packed: set that field of override_config to 0"
            )


def _one_line(error: BaseException) -> str:
    """The first line of a message that may have many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
