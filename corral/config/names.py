"""Values that are names, and the families they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.config.overrides import nearest
from corral.errors import ConfigError


@dataclass(frozen=True)
class Estimator:
    """What an advantage estimator needs, and the keys of algorithm.* that change its result."""

    reads: tuple[str, ...] = ()
    critic: bool = False
    groups: bool = False  # compares the samples of a prompt, so it needs at least two
    sum_pi_squared: bool = False  # reads Σ π² of the distribution each token was drawn from


@dataclass(frozen=True)
class Loss:
    """The keys of actor.* that change a policy loss, and the aggregation it insists on."""

    reads: tuple[str, ...] = ()
    aggregation: str | None = None


ATTENTION = {"flash_attention_2": "flash-attn", "sdpa": "one SDPA call a segment"}
"""override_config.attn_implementation on cuda → what computes it."""

_NORM = "norm_adv_by_std_in_grpo"
ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(("gamma", "lam"), critic=True),
    "grpo": Estimator((_NORM,), groups=True),
    "grpo_passk": Estimator((_NORM,), groups=True),
    "gdpo": Estimator((_NORM, "gdpo_reward_keys", "gdpo_reward_weights"), groups=True),
    "reinforce_plus_plus": Estimator(("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(groups=True),
    "rloo": Estimator(groups=True),
    "opo": Estimator(groups=True),
    "remax": Estimator(),
    "gpg": Estimator(groups=True),
    "optimal_token_baseline": Estimator(groups=True, sum_pi_squared=True),
    "tir_optimal_token_baseline": Estimator(groups=True, sum_pi_squared=True),
}
ESTIMATOR_ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
ESTIMATOR_OPTIONS = ("gamma", "lam", _NORM, "gdpo_reward_keys", "gdpo_reward_weights")
"""Keys of algorithm.* that only some estimators read."""

_CLIP = ("clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")
_CLIP_COV = tuple(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub"))
_KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
LOSSES: dict[str, Loss] = {
    "vanilla": Loss(_DUAL_CLIP),
    "dppo_tv": Loss(_DUAL_CLIP),
    "dppo_kl": Loss(_DUAL_CLIP),
    "gspo": Loss(_CLIP, "seq-mean-token-mean"),
    "sapo": Loss(("tau_pos", "tau_neg"), "seq-mean-token-mean"),
    "gpg": Loss(),
    "clip_cov": Loss((*_CLIP, *_CLIP_COV)),
    "kl_cov": Loss(_KL_COV),
    "geo_mean": Loss(_CLIP, "seq-mean-token-mean"),
    "dro": Loss(("policy_loss.dro_beta",)),
    "cispo": Loss(_CLIP),
    "bypass_mode": Loss(_DUAL_CLIP),  # with loss_type=ppo_clip; reinforce clips nothing
}
LOSS_OPTIONS = (*_DUAL_CLIP, "tau_pos", "tau_neg", *_CLIP_COV, *_KL_COV, "policy_loss.dro_beta")
"""Keys of actor.* that only some losses read."""

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_ESTIMATORS = tuple(
    f"{name}{suffix}" for suffix in ("", "+") for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
)
KL_CONTROLLERS = ("fixed", "adaptive")
REWEIGHT_METHODS = ("pow", "max_min", "max_random")
CORRECTION_LEVELS = ("token", "sequence")
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
BYPASS_LOSSES = ("ppo_clip", "reinforce")
METRIC_ALIASES = {"seq_reward": "score", "seq_final_reward": "reward"}
"""Familiar names of filter_groups.metric → what they measure."""
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
PHASE_RECORDS = ("none", "summary", "full")
RESUME_MODES = ("disable", "auto", "resume_path")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")
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


def is_import_path(name: str) -> bool:
    """Whether a name of an estimator or a loss is a function of the user: "file.py:name" or "package.module:name"."""
    return ":" in name


def estimator(name: str) -> str:
    """The estimator behind any accepted spelling; an import path stays as it is."""
    return ESTIMATOR_ALIASES.get(name, name)


def loss(name: str) -> str:
    """The loss behind any accepted spelling (clip-cov is clip_cov); an import path stays as it is."""
    return name if is_import_path(name) else name.replace("-", "_")


def dtype(key: str, value: str) -> str:
    """The torch name of a dtype under any accepted spelling."""
    if value in ("float16", "fp16", "half"):
        raise ConfigError(f"{key}={value} needs loss scaling, which is not available; use bfloat16 or float32")
    check_name(key, value, tuple(DTYPES))
    return DTYPES[value]
