"""The coefficient of the KL in the reward over a run."""

from __future__ import annotations

from dataclasses import dataclass

from corral.algorithms.kl_control import next_coefficient
from corral.config.plan import KLControl


@dataclass
class KLCoefficient:
    """Fixed, or moved by the adaptive controller; `value` is all of its state."""

    control: KLControl
    value: float

    def follow(self, mean_kl: float, samples: int) -> None:
        """After an iteration of `samples` samples whose mean KL per token was mean_kl."""
        if self.control.type == "adaptive":
            self.value = next_coefficient(
                self.value, mean_kl, samples, target_kl=self.control.target_kl, horizon=self.control.horizon
            )
