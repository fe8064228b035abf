"""One iteration's update by the real group, workers and engines, on any split of ranks, and what it left.

Every rank runs the driver's code on the same batch and its own worker, and hears the others' results through the
process group: so a world is a world of `on_ranks`, without a launcher's processes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from corral.algorithms.aggregate import Denominators
from corral.algorithms.policy_losses import POLICY_LOSSES
from corral.batch import Batch
from corral.config.plan import MicroBatches, Plan, PolicyLossOptions, RolloutCorrection
from corral.engine.engine import Engine
from corral.engine.rank import Rank
from corral.workers.group import WorkerGroup
from corral.workers.worker import MiniBatch, Worker
from tests.algorithms.ragged import MODES
from tests.engine.small import random_batch
from tests.plans import tiny_plan

VOCAB = 97  # that of random_batch
SAMPLES = 12
OPTIONS = PolicyLossOptions(clip_cov_ratio=0.2, clip_cov_lb=0.01, clip_cov_ub=5.0, kl_cov_ratio=0.2, dro_beta=0.3)
LIMITS = {
    "1 sample": MicroBatches(None, 1),
    "2 samples": MicroBatches(None, 2),
    "all samples": MicroBatches(None, SAMPLES),
    "40 tokens": MicroBatches(40, None),
    "all tokens": MicroBatches(10_000, None),
}


@dataclass(frozen=True)
class Goal:
    """What is minimised: a policy loss (bypass_mode/TYPE: with that loss_type), or "critic"."""

    name: str
    mode: str

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"


def goals() -> list[Goal]:
    """Every loss with every aggregation that applies to it, and the critic."""
    names = [name for name in POLICY_LOSSES if name != "bypass_mode"]
    names += ["bypass_mode/ppo_clip", "bypass_mode/reinforce", "critic"]
    forced = {name: loss.aggregation for name, loss in POLICY_LOSSES.items() if loss.aggregation}
    return [Goal(name, mode) for name in names for mode in ([forced[name]] if name in forced else MODES)]


@dataclass(frozen=True)
class Run:
    """One goal on one cut into micro-batches. shuffled: the samples of each mini-batch come in another order. local:
    with a bug, ranks that count tokens and samples for themselves."""

    goal: Goal
    limits: MicroBatches
    shuffled: bool = False
    local: bool = False


@dataclass(frozen=True)
class Outcome:
    """metrics of the iteration, over all ranks; all weights after it, as one vector."""

    metrics: dict[str, float]
    weights: Tensor

    def gap(self, other: Outcome) -> float:
        assert self.metrics.keys() == other.metrics.keys()
        metrics = max(abs(self.metrics[name] - other.metrics[name]) for name in self.metrics)
        return max(metrics, float((self.weights - other.weights).abs().max()))


def write_tiny_model(folder: Path) -> Path:
    """One layer, two heads, 16 wide."""
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return folder


def plan_of(folder: Path, run: Run, world: int, sp: int) -> Plan:
    """Two mini-batches of six samples at lr 0.01."""
    plan = tiny_plan(world=world, sp=sp, path=str(folder), dtype="float64")
    assert plan.critic is not None
    assert plan.critic_update is not None
    assert plan.actor.optim is not None
    changes = {"train": run.limits, "infer": run.limits, "optim": replace(plan.actor.optim, lr=0.01)}
    mode, _, kind = run.goal.name.partition("/")
    cut = {"mini_batch_prompts": SAMPLES // 2, "loss_agg_mode": run.goal.mode, "loss_scale_factor": 16.0}
    actor_update = replace(plan.actor_update, **cut, options=OPTIONS, entropy_coeff=0.01, use_kl_loss=True)
    if mode != "critic":
        actor_update = replace(actor_update, loss_mode=mode)
    if mode.startswith("dppo"):  # its bounds are of probabilities, and those of this model are about 0.01
        actor_update = replace(actor_update, clip_ratio_low=0.001, clip_ratio_high=0.001)
    correction = RolloutCorrection("sequence", None, 2.0, True, (), True, kind) if kind else None
    return replace(
        plan,
        trainer=replace(plan.trainer, collective_check=False),  # it writes what it found
        actor=replace(plan.actor, **changes),
        critic=replace(plan.critic, **changes),
        actor_update=actor_update,
        critic_update=replace(plan.critic_update, **cut),
        algorithm=replace(plan.algorithm, rollout_correction=correction),
    )


class Everywhere:
    """A launcher whose every rank drives: it calls its own worker and gathers what all workers answered."""

    def __init__(self, rank: Rank, worker: Worker) -> None:
        self.rank, self.worker, self.local = rank, worker, False
        self.ranks: list[Any] = []

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        mine = args[self.rank.rank]
        if self.local and method == "update":
            mine = (mine[0], [_counted_here(mini) for mini in mine[1]], *mine[2:])
        result = getattr(self.worker, method)(*mine)
        if self.rank.world == 1:
            return [result]
        results: list[Any] = [None] * self.rank.world
        dist.all_gather_object(results, result)
        return results

    def close(self) -> None: ...


def _counted_here(mini: MiniBatch) -> MiniBatch:
    """The bug: denominators of this rank's share."""
    return replace(mini, objective=replace(mini.objective, denominators=Denominators.of(mini.share.batch)))


class World:
    """Workers of one split on this rank. Each run starts from the same weights and a new optimizer state."""

    def __init__(self, rank: Rank, folder: Path, sp: int) -> None:
        self.rank, self.folder, self.sp = rank, folder, sp
        plan = plan_of(folder, Run(Goal("vanilla", "token-mean"), LIMITS["1 sample"]), rank.world, sp)
        self.worker = Worker(rank, plan, horizon=10)
        self.launcher = Everywhere(rank, self.worker)
        self.start = {
            role: [p.detach().clone() for p in engine.module.parameters()]
            for role, engine in self.worker.engines.items()
        }

    def update(self, run: Run, batch: Batch) -> Outcome:
        role = "critic" if run.goal.name == "critic" else "actor"
        engine = self.worker.engines[role]
        self._reset(role, engine)
        group = WorkerGroup(self.launcher, plan_of(self.folder, run, self.rank.world, self.sp))
        self.launcher.local = run.local
        given = batch.select(shuffled_order(len(batch))) if run.shuffled else batch
        done = (group.update_critic if role == "critic" else group.update_actor)(given, 1)
        assert engine.iteration == 1  # of the schedule, whatever the number of calls
        weights = torch.cat([weight.flatten() for _, weight in engine.full_weights()])
        return Outcome(done.metrics, weights)

    @torch.no_grad()
    def _reset(self, role: str, engine: Engine) -> None:
        for parameter, value in zip(engine.module.parameters(), self.start[role], strict=True):
            parameter.copy_(value)
        assert engine.optimizer is not None
        engine.optimizer.state.clear()
        engine.iteration = 0


def shuffled_order(samples: int) -> list[int]:
    """Another order in which every mini-batch still holds the same samples."""
    generator = torch.Generator().manual_seed(4)
    halves = [torch.randperm(samples // 2, generator=generator) + start for start in (0, samples // 2)]
    return torch.cat(halves).tolist()


def make_batch(folder: Path) -> Batch:
    """Old log-probs around those of the model, so that some ratios are clipped and none is hopeless."""
    batch = random_batch(SAMPLES, dtype=torch.float64)
    run = Run(Goal("vanilla", "token-mean"), LIMITS["all tokens"])
    group = WorkerGroup(World(Rank(), folder, 1).launcher, plan_of(folder, run, 1, 1))
    present = group.infer("actor", batch)["log_probs"]
    generator = torch.Generator().manual_seed(9)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(present.numel(), generator=generator, dtype=torch.float64)

    return batch.with_fields(
        old_log_probs=present + noise(0.4), ref_log_probs=present + noise(0.4), rollout_is_weights=noise(1.0).abs()
    )


def run_all(rank: Rank, folder: Path, batch: Batch, runs: dict[int, list[Run]]) -> dict[int, list[Outcome]]:
    """Outcomes of the runs of each sequence-parallel degree, in one process group. Ranks do not print here."""
    outcomes = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for sp, todo in runs.items():
            world = World(rank, folder, sp)
            outcomes[sp] = [world.update(run, batch) for run in todo]
    return outcomes
