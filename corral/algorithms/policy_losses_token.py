"""Policy losses whose tokens need to know nothing of each other. Legend in `policy_losses_interface`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corral.algorithms.masked import select
from corral.algorithms.policy_losses_interface import (
    PolicyLossInput,
    advantages_of,
    bounded_exp,
    clipped_surrogate,
    log_ratio_of,
)


def vanilla(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clipped surrogate (Schulman et al., arXiv:1707.06347) with the dual clip (Ye et al., arXiv:1912.09729).

    L = max(−A·r, −A·clip(r)); where A < 0 at most −A·c. pg_clipfrac: the ratio's clip decides; pg_clipfrac_lower: c
    does; ppo_kl: −d.
    """
    advantages, log_ratio = advantages_of(tokens), log_ratio_of(tokens)
    pessimistic, clipped = clipped_surrogate(bounded_exp(log_ratio), advantages, tokens.clip_low, tokens.clip_high)
    bound = -advantages * tokens.clip_c
    bounded = (advantages < 0) & (pessimistic > bound)
    return torch.where(bounded, bound, pessimistic), {
        "pg_clipfrac": clipped,
        "pg_clipfrac_lower": bounded,
        "ppo_kl": -log_ratio.detach(),
    }


def dppo_tv(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Divergence proximal policy optimization, total variation (Qi et al., arXiv:2602.04879).

    L = −A · sg(min(r, c)) · log π on tokens inside the trust region, 0 elsewhere. Inside: π − π_old ≤ ε_high where
    A > 0, π − π_old ≥ −ε_low elsewhere. A log-prob above 0, as rounding gives, counts as 0.
    """
    new, old = _probabilities(tokens)
    inside = torch.where(advantages_of(tokens) > 0, new - old <= tokens.clip_high, new - old >= -tokens.clip_low)
    return _trust_region(tokens, inside)


def dppo_kl(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """As `dppo_tv` with the KL of the two-outcome distributions (this token, any other), KL(π_old ‖ π).

    Inside: it is at most ε_high where A > 0, ε_low elsewhere, or the step that A asks for leads back toward π_old.
    """
    new, old = _probabilities(tokens)
    log_new, log_old = _log_probabilities(tokens)
    # log(1 − π) from log π, and 0 · log 0 = 0: probabilities of 1 are common.
    rest = torch.where(old < 1, (1 - old) * (torch.log(-log_old.expm1()) - torch.log(-log_new.expm1())), 0)
    divergence = old * (log_old - log_new) + rest
    inside = torch.where(
        advantages_of(tokens) > 0,
        (divergence <= tokens.clip_high) | (new <= old),
        (divergence <= tokens.clip_low) | (new >= old),
    )
    return _trust_region(tokens, inside)


def _log_probabilities(tokens: PolicyLossInput) -> tuple[Tensor, Tensor]:
    """log π, log π_old [n] without gradient, none above 0."""
    new, old = select(tokens.log_probs.detach(), tokens.mask), select(tokens.old_log_probs, tokens.mask)
    return new.clamp(max=0), old.clamp(max=0)


def _probabilities(tokens: PolicyLossInput) -> tuple[Tensor, Tensor]:
    new, old = _log_probabilities(tokens)
    return new.exp(), old.exp()


def _trust_region(tokens: PolicyLossInput, inside: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """pg_clipfrac: outside the region; pg_clipfrac_lower: c bounds the ratio; ppo_kl: −d."""
    log_ratio = log_ratio_of(tokens).detach()
    ratio = bounded_exp(log_ratio)
    log_probs = select(tokens.log_probs, tokens.mask & inside)
    return -advantages_of(tokens) * ratio.clamp(max=tokens.clip_c) * log_probs, {
        "pg_clipfrac": ~inside,
        "pg_clipfrac_lower": ratio > tokens.clip_c,
        "ppo_kl": -log_ratio,
    }


def sapo(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Soft adaptive policy optimization (Gao et al., arXiv:2511.20347): L = −A · 4/τ · σ(τ(r − 1)).

    τ: options.tau_pos where A > 0, options.tau_neg elsewhere. ppo_kl: −d.
    """
    advantages, log_ratio = advantages_of(tokens), log_ratio_of(tokens)
    ratio = bounded_exp(log_ratio)
    tau = torch.where(advantages > 0, torch.full_like(ratio, tokens.options.tau_pos), tokens.options.tau_neg)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), {"ppo_kl": -log_ratio.detach()}


def gpg(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Group policy gradient (Chu et al., arXiv:2504.02546): L = −A · log π, whatever the old log-probs."""
    return -advantages_of(tokens) * select(tokens.log_probs, tokens.mask), {}


def dro(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Direct reward optimisation (Richemond et al., arXiv:2405.19107): L = −(A · log π − β/2 · d²). ppo_kl: −d.

    β: options.dro_beta. Raises ValueError without it.
    """
    beta = tokens.options.dro_beta
    if beta is None:
        raise ValueError("dro needs dro_beta > 0")
    log_ratio = log_ratio_of(tokens)
    gain = advantages_of(tokens) * select(tokens.log_probs, tokens.mask)
    return beta / 2 * log_ratio.square() - gain, {"ppo_kl": -log_ratio.detach()}


def cispo(tokens: PolicyLossInput) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clipped importance weights (MiniMax, arXiv:2506.13585): L = −sg(clip(r)) · A · log π, for every token.

    pg_clipfrac: the weight is clipped; ppo_kl: −d.
    """
    log_ratio = log_ratio_of(tokens).detach()
    ratio = bounded_exp(log_ratio)
    weight = ratio.clamp(1 - tokens.clip_low, 1 + tokens.clip_high)
    return -weight * advantages_of(tokens) * select(tokens.log_probs, tokens.mask), {
        "pg_clipfrac": weight != ratio,
        "ppo_kl": -log_ratio,
    }
