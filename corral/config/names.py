"""Values that are names, and the families they come from."""

from __future__ import annotations

from collections.abc import Sequence

from corral.config.overrides import nearest
from corral.errors import ConfigError

ESTIMATORS = ("gae",)
ESTIMATORS_LATER = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "remax",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
LOSSES = ("vanilla",)
LOSSES_LATER = (
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_ESTIMATORS = tuple(
    f"{name}{suffix}" for suffix in ("", "+") for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
)
SCHEDULES = ("constant", "linear", "cosine")
STRATEGIES = ("fsdp", "fsdp2")
STRATEGIES_LATER = ("fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")
ENGINES = ("native", "vllm")
ENGINES_LATER = ("sglang", "trtllm", "hf")
LOGGERS = ("console", "file")
LOGGERS_LATER = (
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "tensorboard",
    "clearml",
    "trackio",
    "rl_insight",
)
DEVICES = ("auto", "cpu", "cuda", "npu")
TRUNCATIONS = ("error", "left", "right", "middle")
SKIP_ACTIONS = ("cache", "repeat")
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float64": "float64",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""Accepted spelling → the type's name in torch."""


def check_name(key: str, value: str, known: Sequence[str], later: Sequence[str] = ()) -> None:
    """Raise ConfigError unless `value` is one of `known`; a name of `later` is real but not in this version."""
    if value in known:
        return
    choices = ", ".join(known)
    if value in later:
        raise ConfigError(f"{key}={value} is not available in this version; it has {choices}")
    close = nearest(value, [*known, *later])
    raise ConfigError(f"{key}={value} is unknown; the nearest name is {close!r} (available: {choices})")


def dtype(key: str, value: str) -> str:
    """The torch name of a dtype under any accepted spelling."""
    if value in ("float16", "fp16", "half"):
        raise ConfigError(f"{key}={value} needs loss scaling, which is not available; use bfloat16 or float32")
    check_name(key, value, tuple(DTYPES))
    return DTYPES[value]
