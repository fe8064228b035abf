"""What is done about the engine that generated and the trainer disagreeing on log-probs of the same tokens.

With d = old − rollout log-prob of a token (trainer's minus engine's), a token was drawn from a distribution that is off
by the factor e^d. Importance weights put that factor into the policy loss (truncated: TIS; zero outside a band:
IcePop); rejection takes tokens or whole samples out of the mask, so every denominator and group statistic after it
leaves them out too. All of it looks at the whole batch, before any split, and is defined for any mask.

Sources: truncated importance sampling, Ionides, 2008, and Yao et al., fengyao.notion.site/off-policy-rl, 2025; the
estimators k1, k2, k3, Schulman, joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from corral.algorithms.masked import masked_mean, masked_sum, masked_var, select
from corral.algorithms.segments import sample_of_token, valid_offsets

_MAX_LOG_RATIO = 20.0  # e^20 ≈ 5e8, and its square still is an exact, finite float64

LEVELS = ("token", "sequence")
CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""What a rejection may look at. There is no seq_max_k1: k1 has a sign, and a largest value says nothing of a band."""


class Criterion(Protocol):
    """One rejection. k1 is compared as a ratio, e^k1, with [lower, upper], lower None being 1 / upper; k2 and k3 with
    upper, and with lower when it is set."""

    @property
    def criterion(self) -> str: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float: ...


class Settings(Protocol):
    """rollout_is: None, token or sequence. lower None: weights above `upper` become `upper`; else weights outside
    [lower, upper] become zero. batch_normalize: weights are divided by their mean. All rejections must accept."""

    @property
    def rollout_is(self) -> str | None: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float: ...
    @property
    def batch_normalize(self) -> bool: ...
    @property
    def rejections(self) -> Sequence[Criterion]: ...


@dataclass(frozen=True)
class Correction:
    """weights [R], None without rollout_is: detached, zero outside `mask`. mask [R] bool: the tokens that remain.
    metrics: names without a prefix."""

    weights: Tensor | None
    mask: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def correct(settings: Settings, old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor) -> Correction:
    """Weights and rejections of a whole batch: old and rollout log-probs [R], mask [R] bool, offsets [S+1].

    Raises ValueError for an unknown name, never for what the batch holds: with everything rejected all weights are
    zero and the mask is empty.
    """
    kept = mask
    metrics = {}
    for rule in settings.rejections:
        accepted = accepts(rule, old, rollout, mask, offsets)
        metrics[f"rollout_rs_{rule.criterion}_masked_fraction"] = _share(mask & ~accepted, mask)
        kept = kept & accepted
    if settings.rejections:
        answered, remain = (valid_offsets(m, offsets).diff() > 0 for m in (mask, kept))
        metrics["rollout_rs_masked_fraction"] = _share(mask & ~kept, mask)
        metrics["rollout_rs_seq_masked_fraction"] = _share(answered & ~remain, answered)
    if settings.rollout_is is None:
        return Correction(None, kept, metrics)
    weights = importance_weights(settings, old, rollout, mask, offsets, kept)
    metrics.update(_weight_metrics(weights, kept))
    return Correction(weights, kept, metrics)


@torch.no_grad()
def importance_weights(
    settings: Settings, old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, kept: Tensor | None = None
) -> Tensor:
    """[R] in the dtype of old, detached: e^d per token, or e^(Σ d) per sequence, then truncated or banded.

    kept [R] bool: the part of the mask that is left after rejection, the whole mask by default. A sequence's ratio is
    over its mask; the mean of batch_normalize is over kept tokens (token), or over samples with a kept token
    (sequence), and weights are zero outside kept. All ones without rollout_is. Log-ratios are clamped to ±20.
    """
    if settings.rollout_is not in (None, *LEVELS):
        raise ValueError(f"unknown rollout_is {settings.rollout_is!r}: expected None or one of {LEVELS}")
    kept = mask if kept is None else kept
    if settings.rollout_is is None:
        return kept.to(old.dtype)
    log_ratio = _log_ratio(old, rollout, mask)
    if settings.rollout_is == "sequence":
        log_ratio = _over_samples(log_ratio, offsets)
    weights = _bounded_exp(log_ratio)
    if settings.lower is None:
        weights = weights.clamp(max=settings.upper)
    else:
        weights = torch.where((weights >= settings.lower) & (weights <= settings.upper), weights, 0)
    counted = kept if settings.rollout_is == "token" else valid_offsets(kept, offsets).diff() > 0
    if settings.batch_normalize:
        mean = masked_mean(weights, counted)
        weights = weights / torch.where(mean > 0, mean, 1)
    if settings.rollout_is == "sequence":
        weights = weights[sample_of_token(offsets)]
    return select(weights, kept).to(old.dtype)


@torch.no_grad()
def accepts(rule: Criterion, old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[R] bool: the tokens one criterion accepts, for seq_* all tokens of a sample alike; anything outside the mask.

    token_*: the token's own k. seq_sum_*, seq_mean_*, seq_max_*: sum, mean, largest over the sample's valid tokens.
    k1 = d, k2 = d²/2, k3 = e^d − 1 − d.
    """
    if rule.criterion not in CRITERIA:
        raise ValueError(f"unknown rejection {rule.criterion!r}: expected one of {CRITERIA}")
    level, _, kind = rule.criterion.rpartition("_")
    value = select(_ESTIMATORS[kind](_log_ratio(old, rollout, mask)), mask)
    if level == "seq_max":
        empty = value.new_zeros(offsets.numel() - 1)  # k2 and k3 are never below zero
        value = empty.scatter_reduce(0, sample_of_token(offsets), value, "amax")
    elif level != "token":
        value = _over_samples(value, offsets)
    if level == "seq_mean":
        value = value / valid_offsets(mask, offsets).diff().clamp(min=1)
    lower, upper = _bounds(rule, kind)
    accepted = (value >= lower) & (value <= upper)
    return accepted if level == "token" else accepted[sample_of_token(offsets)]


@torch.no_grad()
def mismatch(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart, for old and rollout log-probs [R]; empty without a valid token.

    kl, k3_kl: KL(rollout ‖ old) by k1 and k3, means over tokens. chi2_token: mean e^(2d) − 1 over tokens; chi2_seq:
    mean e^(2 Σd) − 1 over samples (exponents of the ratio clamped to ±20). training_ppl, rollout_ppl: e^(− mean
    log-prob) of each sample, log_ppl_diff: the engine's mean log-prob less the trainer's, ppl_ratio: e^that; all
    means over samples with a valid token.
    """
    if not bool(mask.any()):
        return {}
    d = _log_ratio(old, rollout, mask)
    lengths = valid_offsets(mask, offsets).diff()
    some = lengths > 0
    trainer, engine = ((_over_samples(select(x, mask).double(), offsets)[some] / lengths[some]) for x in (old, rollout))
    gap = engine - trainer
    per_sample = _bounded_exp(_over_samples(d, offsets)[some])
    out = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(_k3(d), mask),
        "chi2_token": masked_mean(_bounded_exp(d).square(), mask) - 1,
        "chi2_seq": per_sample.square().mean() - 1,
        "training_ppl": _perplexity(trainer),
        "rollout_ppl": _perplexity(engine),
        "training_log_ppl": -trainer.mean(),
        "rollout_log_ppl": -engine.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": _bounded_exp(gap).mean(),
    }
    return {name: float(value) for name, value in out.items()}


def _log_ratio(old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """d [R] in float64, zero outside the mask."""
    return select(old, mask).double() - select(rollout, mask).double()


def _bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _k3(d: Tensor) -> Tensor:
    bounded = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1: e^d − 1 of a small d keeps its digits. The linear term is not clamped, so a huge −d still grows.
    return bounded.expm1() - torch.minimum(d, bounded)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": _k3,
}


def _bounds(rule: Criterion, kind: str) -> tuple[float, float]:
    """The band in units of the estimator: a ratio's logarithm for k1."""
    if kind != "k1":
        return (-math.inf if rule.lower is None else rule.lower), rule.upper
    lower = 1 / rule.upper if rule.lower is None else rule.lower
    return (math.log(lower) if lower > 0 else -math.inf), math.log(rule.upper)


def _over_samples(x: Tensor, offsets: Tensor) -> Tensor:
    """[S]: sums of x [R], zero outside its mask."""
    return x.new_zeros(offsets.numel() - 1).index_add_(0, sample_of_token(offsets), x)


def _perplexity(mean_log_probs: Tensor) -> Tensor:
    return (-mean_log_probs).clamp(max=700).exp().mean()


def _share(part: Tensor, whole: Tensor) -> float:
    """Of two bool vectors, Σ part / Σ whole; 0 of nothing."""
    return float(part.sum() / whole.sum().clamp(min=1))


def _weight_metrics(weights: Tensor, kept: Tensor) -> dict[str, float]:
    """Over the tokens that remain; all zero when none do. eff_sample_size: (Σ w)² / (tokens · Σ w²)."""
    wide = weights.double()
    left = wide[kept] if bool(kept.any()) else wide.new_zeros(1)
    squares = masked_sum(wide.square(), kept)
    size = masked_sum(wide, kept).square() / torch.where(squares > 0, squares * kept.sum(), 1)
    return {
        "rollout_is_mean": float(left.mean()),
        "rollout_is_max": float(left.max()),
        "rollout_is_min": float(left.min()),
        "rollout_is_std": float(masked_var(wide, kept).sqrt()),
        "rollout_is_eff_sample_size": float(size),
        "rollout_is_zero_fraction": _share(kept & (weights == 0), kept),
    }
