"""Estimators of KL(policy ‖ reference) from log-probs of sampled tokens (Schulman, joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from corral.algorithms.masked import select

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def _k3(log_ratio: Tensor) -> Tensor:
    back = (-log_ratio).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1: e^u − 1 of a small u keeps its digits.
    return (back.expm1() - back).clamp(max=_MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "abs": lambda log_ratio: log_ratio.abs(),
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": _k3,
}
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """KL per token [n] from log_probs [n], ref_log_probs [n] and mask [n] bool; zero outside the mask.

    kind: a key of KL_ESTIMATORS or KL_ALIASES. A trailing "+" keeps that estimator's value and gives it the gradient
    of k2, which is the one whose expectation is the gradient of the KL; the reference gets no gradient then. k3 and
    its gradient are bounded: its log-ratio is clamped to ±20 and its value to 10. Raises ValueError for an unknown
    kind.
    """
    name = kind.removesuffix("+")
    estimator = KL_ESTIMATORS.get(KL_ALIASES.get(name, name))
    if estimator is None:
        raise ValueError(
            f"unknown KL estimator {kind!r}: expected one of {[*KL_ESTIMATORS, *KL_ALIASES]}, or one with +"
        )
    policy = select(log_probs, mask)
    log_ratio = policy - select(ref_log_probs, mask)
    if not kind.endswith("+"):
        return estimator(log_ratio)
    # The second term is exactly zero with gradient log_ratio, and cannot overflow as log_ratio² would.
    return estimator(log_ratio.detach()) + log_ratio.detach() * (policy - policy.detach())


def kl_in_reward(
    scores: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, coef: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(rewards [R], kl [R]): rewards = scores − coef · kl(old, ref), the penalty on valid tokens only.

    Scores are taken as they are, also at masked positions: an estimator credits those to the policy's last token.
    """
    penalty = kl(old_log_probs, ref_log_probs, mask, kind)
    return scores - coef * penalty, penalty
