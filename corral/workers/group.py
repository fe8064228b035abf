"""The driver's handle on all workers: cuts a batch for the ranks, runs a phase, puts the results back in order.

Everything about cutting happens here, where all lengths are known: which samples form a mini-batch (a fixed set of
prompts, whatever the world size), which data-parallel rank takes which of them, and which share a packed row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from corral.algorithms.aggregate import Denominators
from corral.batch import Batch, gather_rows
from corral.config.plan import (
    ActorUpdate,
    CriticUpdate,
    EnginePlan,
    MicroBatches,
    Plan,
    RolloutCorrection,
    Sampling,
)
from corral.config.reads import Reads, merged
from corral.engine.losses import ActorObjective, CriticObjective, Objective, needs_statistics, with_statistics
from corral.engine.packing import split
from corral.engine.recorded import RecordedTensor, added
from corral.rollout.base import Completion, Request
from corral.workers.launcher import Launcher
from corral.workers.update import OptimizerStep, Update, summarise
from corral.workers.worker import MiniBatch, Phase, Share, Speed, StepStats

log = logging.getLogger(__name__)


class WorkerGroup:
    """All ranks, driven as one. Results are on the CPU, in the order of the batch that was given."""

    def __init__(self, launcher: Launcher, plan: Plan) -> None:
        self.launcher = launcher
        self.plan = plan
        self.world = plan.topology.world
        self.rollout_started = False
        self._oversized: set[tuple[str, int]] = set()

    # Generation ----------------------------------------------------------------------------------------------------

    def start_rollout(self, eos_token_ids: Sequence[int]) -> None:
        """Start the replicas; a response ends at any of the given tokens."""
        self.launcher.call("start_rollout", [(tuple(eos_token_ids),)] * self.world)
        self.rollout_started = True

    def generate(self, requests: Sequence[Request], sampling: Sampling, step: int) -> list[Completion]:
        """One completion a request, in order. Neighbours (the samples of a prompt) mostly share a replica."""
        parts = [requests[a:b] for a, b in itertools.pairwise(self._replica_cuts(len(requests)))]
        done = self.launcher.call("generate", [(parts[rank // self._tp], sampling, step) for rank in range(self.world)])
        return [completion for part in done[:: self._tp] for completion in part]  # a replica's ranks hold the same

    def replica_ranks(self, count: int) -> list[int]:
        """Which replica, by its first rank, `generate` gives each of so many requests."""
        cuts = self._replica_cuts(count)
        return [replica * self._tp for replica, (a, b) in enumerate(itertools.pairwise(cuts)) for _ in range(a, b)]

    def _replica_cuts(self, count: int) -> list[int]:
        replicas = self.plan.rollout.replicas
        return [count * replica // replicas for replica in range(replicas + 1)]

    @property
    def _tp(self) -> int:
        return self.plan.rollout.tensor_model_parallel_size

    def push_weights(self, probe: Batch) -> float:
        """Give the replicas the actor's weights; the largest log-prob gap any of them shows on the probe."""
        gaps: list[float] = self.launcher.call("push_weights", [(probe,)] * self.world)
        return max(gaps)

    # Scoring -------------------------------------------------------------------------------------------------------

    def infer(
        self,
        role: str,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Per-token results [R] of one role: values of "critic"; log_probs, and what is asked for, of the others."""
        engine = self._engine(role)
        indices, shares = self._shares(batch, engine, engine.infer)
        args = [(role, shares[rank // engine.sp], temperature, entropy, sum_pi_squared) for rank in range(self.world)]
        results = self.launcher.call("infer", args)[:: engine.sp]  # peers of a sequence group hold the same result
        order = torch.tensor([i for share in indices for i in share])
        return {name: _in_batch_order(batch, order, [r[name] for r in results]) for name in results[0]}

    def inference_ranks(self, role: str, batch: Batch) -> list[int]:
        """The rank that `infer` gives each sample of the batch; the first one where several share a sequence."""
        engine = self._engine(role)
        indices, _ = self._shares(batch, engine, engine.infer)
        rank_of = {sample: dp_rank * engine.sp for dp_rank, picked in enumerate(indices) for sample in picked}
        return [rank_of[sample] for sample in range(len(batch))]

    # Training ------------------------------------------------------------------------------------------------------

    def update_actor(self, batch: Batch, step: int) -> Update:
        """All optimizer steps of the policy for this iteration."""
        return self._update("actor", batch, self.plan.actor_update, step)

    def update_critic(self, batch: Batch, step: int) -> Update:
        """All optimizer steps of the value function for this iteration."""
        assert self.plan.critic_update is not None
        return self._update("critic", batch, self.plan.critic_update, step)

    def _update(self, role: str, batch: Batch, update: ActorUpdate | CriticUpdate, step: int) -> Update:
        cuts = mini_batches(batch, update, self.plan.rollout.sampling.n, step)
        # Statistics are of the weights an optimizer step starts from, so the step before has to be over.
        one_by_one = self._needs_statistics(update)
        calls = [[k] for k in range(len(cuts))] if one_by_one else [list(range(len(cuts)))]
        per_rank: list[list[StepStats]] = [[] for _ in range(self.world)]
        denominators: list[Denominators] = []
        rates: list[float] = []
        for numbers in calls:
            minis = [self._with_statistics(batch.select(cuts[k]), update, (step, k)) for k in numbers]
            parts = [self._mini_batches(role, mini, update) for mini in minis]
            last = numbers[-1] == len(cuts) - 1
            temperature = self.plan.rollout.sampling.temperature
            args = [(role, [part[rank] for part in parts], temperature, last) for rank in range(self.world)]
            for done, (steps, rate) in zip(per_rank, self.launcher.call("update", args), strict=True):
                done += steps
                rates.append(rate)
            denominators += [Denominators.of(mini) for mini in minis]
        steps = [
            OptimizerStep.of(batch.row[cut].tolist(), denominators[k], [rank[k] for rank in per_rank])
            for k, cut in enumerate(cuts)
        ]
        return summarise(role, steps, lr=rates[0])

    def _needs_statistics(self, update: ActorUpdate | CriticUpdate) -> bool:
        return isinstance(update, ActorUpdate) and needs_statistics(update, self._correction)

    def _with_statistics(self, mini: Batch, update: ActorUpdate | CriticUpdate, key: tuple[int, int]) -> Batch:
        """The mini-batch with what its policy loss has to know of it, at the present weights."""
        if not isinstance(update, ActorUpdate) or not self._needs_statistics(update):
            return mini
        present = self.infer("actor", mini, temperature=self.plan.rollout.sampling.temperature)
        return with_statistics(mini, present["log_probs"], update, self._correction, key)

    def _mini_batches(self, role: str, mini: Batch, update: ActorUpdate | CriticUpdate) -> list[MiniBatch]:
        """Each rank's part of one optimizer step."""
        engine = self._engine(role)
        assert engine.train is not None
        objective = _objective(update, Denominators.of(mini), self._correction)
        _, shares = self._shares(mini, engine, engine.train)
        return [MiniBatch(shares[rank // engine.sp], objective) for rank in range(self.world)]

    @property
    def _correction(self) -> RolloutCorrection | None:
        return self.plan.algorithm.rollout_correction

    def _engine(self, role: str) -> EnginePlan:
        engine = {"actor": self.plan.actor, "critic": self.plan.critic, "ref": self.plan.ref}[role]
        assert engine is not None
        return engine

    def _shares(self, batch: Batch, engine: EnginePlan, limits: MicroBatches) -> tuple[list[list[int]], list[Share]]:
        """Sample indices and share of each data-parallel rank."""
        cut = split(batch.lengths, engine.dp, limits, balance=self.plan.trainer.balance_batch)
        for sample in cut.oversized:
            self._warn_oversized(engine.role, int(batch.row[sample]), batch.lengths[sample], limits.token_budget)
        padded = batch.padded(cut.padding)
        indices, shares = [], []
        for micro in cut.shares:
            picked = [i for row in micro for i in row]
            places = iter(range(len(picked)))
            shares.append(Share(padded.select(picked), [[next(places) for _ in row] for row in micro]))
            indices.append(picked)
        return indices, shares

    def _warn_oversized(self, role: str, row: int, length: int, budget: int | None) -> None:
        """Once a row and role: the same sample comes by in several phases of a step."""
        if (role, row) not in self._oversized:
            self._oversized.add((role, row))
            log.warning(
                "data row %d: a sample of %d tokens is over the %s's budget of %s, it gets a micro-batch of its own",
                row, length, role, budget,
            )  # fmt: skip

    def recorded_weights(self, role: str) -> dict[str, RecordedTensor]:
        """The role's weights as trainer.record_phases asks for them."""
        return added(self.launcher.call("recorded_weights", [(role,)] * self.world))

    # The rest ------------------------------------------------------------------------------------------------------

    def save(self, role: str, folder: str, contents: Sequence[str]) -> None:
        """Write one role's part of a checkpoint: model, optimizer, extra, hf_model, as asked for."""
        self.launcher.call("save", [(role, folder, tuple(contents))] * self.world)

    def load(self, role: str, folder: str) -> None:
        """Go on from one role's part of a checkpoint, whatever world wrote it."""
        self.launcher.call("load", [(role, folder)] * self.world)

    def plan_reads(self) -> Reads:
        """The fields of the plan that any rank has read, and by which modules."""
        return merged(*self.launcher.call("plan_reads", [()] * self.world))

    def speed(self) -> Speed:
        """What perf/mfu is computed from, by the first rank: all devices of a run are alike."""
        speeds: list[Speed] = self.launcher.call("speed", [()] * self.world)
        return speeds[0]

    def trace(self) -> list[list[Phase]]:
        """Phases of each rank since the last call."""
        return self.launcher.call("trace", [()] * self.world)


def mini_batches(batch: Batch, update: ActorUpdate | CriticUpdate, n: int, step: int) -> list[list[int]]:
    """Sample indices of each optimizer step of one iteration: fixed sets of prompts, in order unless shuffled.

    The batch holds n samples of each prompt next to each other. Nothing but the batch, the plan and the step matters.
    """
    prompts = len(batch) // n
    out = []
    for epoch in range(update.epochs):
        order = list(range(prompts))
        if update.shuffle:
            generator = torch.Generator().manual_seed((update.shuffle_seed * 1_000_003 + step) * 1_000_003 + epoch)
            order = torch.randperm(prompts, generator=generator).tolist()
        for start in range(0, prompts, update.mini_batch_prompts):
            chosen = order[start : start + update.mini_batch_prompts]
            out.append([prompt * n + k for prompt in chosen for k in range(n)])
    return out


def _objective(
    update: ActorUpdate | CriticUpdate, denominators: Denominators, correction: RolloutCorrection | None
) -> Objective:
    if isinstance(update, ActorUpdate):
        return ActorObjective(update, denominators, correction)
    return CriticObjective(update, denominators)


def _in_batch_order(batch: Batch, order: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """[R] from the parts' tokens, which lie sample by sample in `order` (no-op samples have indices past the batch)."""
    samples = len(batch)
    lengths = torch.cat([batch.response_lengths, torch.ones(max(0, order.numel() - samples), dtype=torch.int64)])[order]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    at, _ = gather_rows(offsets, order.argsort()[:samples])
    return torch.cat(list(parts))[at]
