"""Advantages from the rewards that follow each token."""

from __future__ import annotations

import torch
from torch import Tensor

from corral.algorithms.advantage_input import AdvantageInput, ValidTokens, needed
from corral.algorithms.masked import standardised
from corral.algorithms.segments import discounted_suffix_sums


def gae(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438) over the policy's own tokens.

    Masked tokens (tool output, observations) are not actions: they are taken out of the row, so neither γ nor λ
    counts them. The value after a sample's last token is 0, also when it was cut off by length. returns = advantages +
    values before whitening; advantages are then whitened over all valid tokens of the batch.

    Raises ValueError without values.
    """
    tokens = ValidTokens.of(batch)
    values = tokens.take(needed(batch.values, "gae", "the critic's values"))

    deltas = tokens.rewards - values
    last = tokens.offsets[1:][tokens.offsets.diff() > 0] - 1
    at_the_end = deltas[last]
    deltas[:-1].add_(values[1:], alpha=batch.gamma)
    deltas[last] = at_the_end
    advantages = discounted_suffix_sums(deltas, tokens.offsets, batch.gamma * batch.lam)
    # Fresh memory costs more than the sums at millions of tokens, hence into `deltas`, which is not needed any more.
    returns = torch.add(advantages, values, out=deltas)
    return tokens.spread(standardised(advantages), batch), tokens.spread(returns, batch)


def reinforce_plus_plus(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Whitened discounted returns (Hu, 2025, arXiv:2501.03262): G_t = r_t + γ G_{t+1} over valid tokens.

    returns = G; advantages = G whitened over all valid tokens of the batch. γ counts the policy's own tokens only.
    """
    tokens = ValidTokens.of(batch)
    returns = discounted_suffix_sums(tokens.rewards, tokens.offsets, batch.gamma)
    return tokens.spread(standardised(returns), batch), tokens.spread(returns, batch)
