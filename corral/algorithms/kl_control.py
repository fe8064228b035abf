"""The coefficient of a KL in the reward, steered towards a target."""

from __future__ import annotations

_MAX_ERROR = 0.2


def next_coefficient(coefficient: float, mean_kl: float, samples: int, target_kl: float, horizon: int) -> float:
    """The coefficient after a step (Ziegler et al., 2019, arXiv:1909.08593, section 2.2).

    coefficient · (1 + clip(mean_kl / target_kl − 1, ±0.2) · samples / horizon), mean_kl being the mean over samples of
    their mean KL per token, horizon in samples. All of the controller's state is the coefficient.

    Raises ValueError unless target_kl and horizon are positive, mean_kl is finite and samples < 5 · horizon: beyond,
    the coefficient could turn negative and reward divergence.
    """
    if not target_kl > 0 or not horizon > 0:
        raise ValueError(f"target_kl={target_kl} and horizon={horizon} have to be positive")
    if not abs(mean_kl) < float("inf"):
        raise ValueError(f"mean KL is {mean_kl}")
    if _MAX_ERROR * samples >= horizon:
        raise ValueError(
            f"horizon={horizon} is too short for {samples} samples a step: it has to exceed a fifth of them"
        )
    error = min(max(mean_kl / target_kl - 1, -_MAX_ERROR), _MAX_ERROR)
    return coefficient * (1 + error * samples / horizon)
