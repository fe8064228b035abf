"""algorithm.*: how rewards become advantages."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from corral.config.section import Section, key, section


@dataclass
class KlControl(Section):
    type: str = key("fixed", "How the coefficient of the KL penalty in the reward moves: fixed.")
    kl_coef: float = key(0.001, "Coefficient of the KL penalty in the reward.")
    horizon: int = key(10000, "Horizon of the adaptive controller.", "samples")
    target_kl: float = key(0.1, "Target of the adaptive controller.")


@dataclass
class Algorithm(Section):
    adv_estimator: str = key("gae", "Advantage estimator: gae (needs a critic).")
    gamma: float = key(1.0, "Discount factor, in (0, 1].")
    lam: float = key(1.0, "GAE trade-off between bias and variance, in [0, 1].")
    use_kl_in_reward: bool = key(False, "Subtract a KL penalty against the reference model from the token rewards.")
    kl_penalty: str = key(
        "kl", "Estimator of that KL: kl (k1), abs, mse (k2), low_var_kl (k3); a trailing + takes its gradient from k2."
    )
    kl_ctrl: KlControl = section(KlControl, "Coefficient of the KL penalty in the reward.")
