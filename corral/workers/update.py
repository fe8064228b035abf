"""What the optimizer steps of one iteration did, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.algorithms.aggregate import Denominators
from corral.engine.memory import DeviceMemory
from corral.engine.recorded import RecordedTensor, added
from corral.workers.worker import StepStats

# Terms of the loss: an iteration reports their means over optimizer steps. Every other statistic is a mean over tokens,
# and an iteration's value weighs each mini-batch by its tokens.
LOSS_TERMS = ("loss", "pg_loss", "entropy_loss", "kl_loss", "vf_loss")


@dataclass(frozen=True)
class OptimizerStep:
    """One of them. rows: data row of each sample of its mini-batch. parts: statistics of each rank, which add up.

    gradients: of the whole model, before clipping, when phases are recorded. memory: of the device that had most.
    """

    rows: list[int]
    denominators: Denominators
    grad_norm: float
    skipped: bool
    parts: list[dict[str, float]]
    gradients: dict[str, RecordedTensor]
    memory: DeviceMemory | None = None

    @staticmethod
    def of(rows: list[int], denominators: Denominators, ranks: Sequence[StepStats]) -> OptimizerStep:
        """From what each rank says of it."""
        return OptimizerStep(
            rows=rows,
            denominators=denominators,
            grad_norm=ranks[0].grad_norm,
            skipped=ranks[0].skipped,
            parts=[rank.stats for rank in ranks],
            gradients=added([rank.gradients for rank in ranks]),
            memory=DeviceMemory.largest(rank.memory for rank in ranks),
        )


@dataclass(frozen=True)
class Update:
    """The optimizer steps of one role in one iteration, and what they come to."""

    role: str
    metrics: dict[str, float]
    steps: list[OptimizerStep]

    @property
    def optimizer_steps(self) -> int:
        return len(self.steps)

    @property
    def skipped(self) -> int:
        """Optimizer steps that were left out for a gradient that was not finite."""
        return sum(step.skipped for step in self.steps)


def summarise(role: str, steps: list[OptimizerStep], lr: float) -> Update:
    """An iteration's statistics: sums over ranks, means over the steps that were taken."""
    taken = [step for step in steps if not step.skipped]
    metrics = {"lr": lr, "skipped_steps": float(len(steps) - len(taken))}
    for name in steps[0].parts[0] if taken else ():
        values = [sum(part[name] for part in step.parts) for step in taken]
        weights = [1.0 if name in LOSS_TERMS else float(step.denominators.tokens) for step in taken]
        total = sum(weights)
        metrics[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / total if total else 0.0
    if taken:
        metrics["grad_norm"] = sum(step.grad_norm for step in taken) / len(taken)
    memory = DeviceMemory.largest(step.memory for step in steps)
    if memory is not None:
        metrics["perf/max_memory_allocated_gb"] = memory.peak_allocated / 2**30
        metrics["perf/max_memory_reserved_gb"] = memory.peak_reserved / 2**30
    return Update(role, metrics, steps)
