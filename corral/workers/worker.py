"""One process of the world: it hosts every role placed on its device and runs the phases the driver asks for.

Nothing here decides anything. The driver has cut the batch, so a call brings the samples of this rank, the
micro-batches they form, and global denominators; a result goes back in the order of the samples that came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from corral.batch import Batch
from corral.config.plan import EnginePlan, Plan, Sampling
from corral.config.reads import Reads, reads
from corral.engine.device import be_deterministic
from corral.engine.distributed import device_of
from corral.engine.engine import Engine
from corral.engine.flops import Dense
from corral.engine.losses import Objective
from corral.engine.memory import DeviceMemory
from corral.engine.model import build_model
from corral.engine.offload import Parking
from corral.engine.rank import Rank
from corral.engine.recorded import RecordedTensor
from corral.platform import platform
from corral.rollout.base import Completion, Request, RolloutEngine
from corral.rollout.native import NativeEngine
from corral.rollout.vllm import VllmEngine
from corral.workers.collective_check import check_collectives


@dataclass(frozen=True)
class Share:
    """What one rank gets of a batch: its samples, and which of them form each micro-batch."""

    batch: Batch
    micro: list[list[int]]


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's share of one rank, with the objective that holds the global denominators."""

    share: Share
    objective: Objective


@dataclass(frozen=True)
class StepStats:
    """One optimizer step on one rank. `stats`, and `gradients` if recorded, are this rank's part of sums over ranks.

    memory: of the rank's device after the step; None on the CPU.
    """

    stats: dict[str, float]
    grad_norm: float
    skipped: bool
    gradients: dict[str, RecordedTensor] = field(default_factory=dict)
    memory: DeviceMemory | None = None


@dataclass(frozen=True)
class Speed:
    """What the use of a device is measured by. costs: of the roles that train, as far as they are known; peak:
    operations a second of one device in the compute dtype, None where it is not known."""

    costs: dict[str, Dense]
    peak: float | None


@dataclass(frozen=True)
class Phase:
    """A stretch of time for the trace; seconds since the epoch."""

    name: str
    start: float
    duration: float


class Worker:
    """The roles of one rank: actor, critic, reference, and a rollout replica once generation needs one."""

    def __init__(self, rank: Rank, plan: Plan, horizon: int) -> None:
        self.rank = rank
        self.plan = plan
        self.phases: list[Phase] = []
        if plan.trainer.full_determinism:
            be_deterministic(rank.device)
        if rank.world > 1 and plan.trainer.collective_check:
            self._check_collectives()
        with self._phase("build"):
            self.engines = {
                role: Engine(engine_plan, rank, horizon=horizon)
                for role, engine_plan in (("actor", plan.actor), ("critic", plan.critic), ("ref", plan.ref))
                if engine_plan is not None
            }
            sizes = {role: sum(p.numel() for p in e.module.parameters()) for role, e in self.engines.items()}
        self.rollout: RolloutEngine | None = None
        self._copy: Parking | None = None  # the native rollout's own weights, in a world of more than one
        built = ", ".join(f"{role} {size / 1e6:.2f} M parameters" for role, size in sizes.items())
        self._say(f"rank {rank.rank} of {rank.world}: built {built}")

    def _check_collectives(self) -> None:
        """Before anything is loaded, so that a bad node costs seconds and has a name."""
        facts = {"dtype": f"{self.plan.actor.master_dtype}, {self.plan.actor.compute_dtype}"}
        devices, run_dir = self.plan.topology.devices_per_node, self.plan.trainer.run_dir
        with self._phase("collective_check"):
            check_collectives(self.rank, devices, run_dir, facts=facts)
        self._say(f"rank {self.rank.rank}: collectives are right and no pair of ranks is slow: checked")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self.phases.append(Phase(name, start, time.time() - start))

    def _say(self, what: str) -> None:
        """One line for the rank's log, with the seconds of the phase just ended; alone in the world there is no log."""
        if self.rank.world > 1:
            print(f"{what} in {self.phases[-1].duration:.2f} s", flush=True)

    def trace(self) -> list[Phase]:
        """Phases since the last call."""
        phases, self.phases = self.phases, []
        return phases

    def plan_reads(self) -> Reads:
        """The fields of the plan that were read in this process, and by which modules."""
        return reads()

    def speed(self) -> Speed:
        """What perf/mfu is computed from."""
        trained = {role: engine for role, engine in self.engines.items() if engine.plan.optim is not None}
        costs = {role: Dense.of(engine.module.config) for role, engine in trained.items()}
        return Speed({role: cost for role, cost in costs.items() if cost is not None}, self._peak())

    def _peak(self) -> float | None:
        """The known peaks are those of bfloat16."""
        if self.rank.device == "cpu" or self.plan.actor.compute_dtype != "bfloat16":
            return None
        device = self.engines["actor"].device
        return platform(self.rank.device).peak(torch.get_device_module(device).get_device_name(device))

    # Scoring -------------------------------------------------------------------------------------------------------

    def infer(
        self, role: str, share: Share, temperature: float, entropy: bool, sum_pi_squared: bool
    ) -> dict[str, Tensor]:
        """{"log_probs": [R], "entropy": [R], "sum_pi_squared": [R]} of actor or ref, {"values": [R]} of the critic."""
        name = {"actor": "old_log_prob", "ref": "ref", "critic": "values"}[role]
        engine = self.engines[role]
        with self._phase(name), engine.loaded(optimizer=False):
            return engine.infer(
                share.batch, share.micro, temperature=temperature, entropy=entropy, sum_pi_squared=sum_pi_squared
            )

    # Training ------------------------------------------------------------------------------------------------------

    def update(
        self, role: str, mini_batches: Sequence[MiniBatch], temperature: float, last: bool
    ) -> tuple[list[StepStats], float]:
        """Optimizer steps in order; the statistics of each and the learning rate they used.

        last: they are the last of their iteration, so the schedule moves on.
        """
        engine, record = self.engines[role], self.plan.trainer.record_phases
        lr = engine.lr
        steps = []
        with self._phase(f"update_{role}"), engine.loaded(optimizer=True):
            for mini in mini_batches:
                done = engine.train_step(
                    mini.share.batch, mini.share.micro, mini.objective, temperature=temperature, record=record
                )
                memory = DeviceMemory.of(engine.device)
                steps.append(StepStats(done.stats, done.grad_norm, done.skipped, done.gradients, memory))
        if last:
            engine.end_iteration()
        self._say(f"updated {role}, {len(steps)} optimizer steps,")
        return steps, lr

    def recorded_weights(self, role: str) -> dict[str, RecordedTensor]:
        """The role's weights as trainer.record_phases asks for them."""
        engine = self.engines[role]
        with self._phase("record_phases"), engine.loaded(optimizer=False):
            return engine.recorded_weights(self.plan.trainer.record_phases)

    # Generation ----------------------------------------------------------------------------------------------------

    def start_rollout(self, eos_token_ids: Sequence[int]) -> None:
        """Start this rank's replica, or its part of one."""
        with self._phase("start_rollout"):
            self.rollout = self._vllm(eos_token_ids) if self._runs_vllm else self._native(eos_token_ids)

    def _native(self, eos_token_ids: Sequence[int]) -> NativeEngine:
        """Alone in the world it decodes on the trainer's own module, else on a full copy."""
        module: nn.Module = self.engines["actor"].module
        if self.rank.world > 1:
            self._copy = full_copy(self.plan.actor, self.rank)
            module = self._copy.module
        return NativeEngine(
            module,
            eos_token_ids=eos_token_ids,
            plan=self.plan.rollout,
            max_length=self.plan.rollout.prompt_length + self.plan.rollout.response_length,
            compute_dtype=getattr(torch, self.plan.actor.compute_dtype),
        )

    def _vllm(self, eos_token_ids: Sequence[int]) -> VllmEngine:
        engine = VllmEngine(
            self.plan.actor.model,
            self.rank,
            eos_token_ids=eos_token_ids,
            plan=self.plan.rollout,
        )
        engine.sleep()
        return engine

    @property
    def _runs_vllm(self) -> bool:
        return self.plan.rollout.name == "vllm"

    @contextmanager
    def _loaded_rollout(self) -> Iterator[RolloutEngine]:
        """The replica, its weights on the device and awake."""
        assert self.rollout is not None
        with ExitStack() as stack:
            if not self._runs_vllm:  # which moves its weights itself
                parking = self.engines["actor"] if self._copy is None else self._copy
                stack.enter_context(parking.loaded(optimizer=False))
            self.rollout.wake()
            yield self.rollout
            self.rollout.sleep()

    def generate(self, requests: Sequence[Request], sampling: Sampling, step: int) -> list[Completion]:
        """Completions in the order of the requests (which may be none)."""
        with self._phase("generate"), self._loaded_rollout() as rollout:
            done = rollout.generate(requests, sampling, step=step)
        self._say(f"step {step}: generated {sum(len(c.token_ids) for c in done)} tokens for {len(done)} samples")
        return done

    def push_weights(self, probe: Batch) -> float:
        """Give the actor's weights to the replica; the largest log-prob gap between both on the one-sample probe."""
        actor = self.engines["actor"]
        with self._phase("update_weights"), actor.loaded(optimizer=False), self._loaded_rollout() as rollout:
            if self.rank.world > 1 or self._runs_vllm:
                rollout.update_weights(actor.full_weights())
            here = actor.infer(probe, [[0]], temperature=1.0)["log_probs"]
            there = rollout.score(probe.prompt(0).tolist(), probe.response(0).tolist())
        return float((here - torch.tensor(there, dtype=here.dtype)).abs().max())

    def close(self) -> None:
        """The last call: a vllm replica has processes of its own kind to end."""
        if self.rollout is not None:
            self.rollout.close()

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, role: str, folder: str, contents: Sequence[str]) -> None:
        """Write the role's part of a checkpoint (rank 0 writes, all ranks take part)."""
        engine = self.engines[role]
        with self._phase("save_checkpoint"), engine.loaded(optimizer="optimizer" in contents):
            engine.save_checkpoint(Path(folder), contents)

    def load(self, role: str, folder: str) -> None:
        """Go on from the role's part of a checkpoint; every rank reads its own share of it."""
        engine = self.engines[role]
        with self._phase("load_checkpoint"), engine.loaded(optimizer=True):
            engine.load_checkpoint(Path(folder))
        self._say(f"loaded {role} of {folder}")


def full_copy(plan: EnginePlan, rank: Rank) -> Parking:
    """The whole model on this rank's device, in the compute dtype: what sharded weights are cast to before a product.

    Between phases it is where the plan wants parameters to be.
    """
    device = device_of(rank)
    module: nn.Module = build_model(replace(plan, master_dtype=plan.compute_dtype), rank).requires_grad_(False).eval()
    return Parking(
        module.to(device),
        None,
        device=device,
        host=torch.device("cpu"),
        parameters=plan.param_offload,
        optimizer_state=False,
    )
