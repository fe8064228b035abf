"""One model on one rank: scores batches, takes optimizer steps, gives its weights away.

Legend: R response tokens of the given batch, n those of one slice of one packed row. All calls but `lr` are
collective: every rank of the world makes them, with equally many micro-batches. Sequence-parallel peers are given the
same batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from corral.batch import Batch
from corral.config.plan import EnginePlan
from corral.engine import checkpoint, kernels
from corral.engine.attention import CONTEXT, PackedAttention
from corral.engine.device import deterministic_backward
from corral.engine.distributed import device_of, parallel
from corral.engine.export import full_tensor, full_weights, own_tensors, write_folder
from corral.engine.log_probs import at_least_float32, log_probs_and_entropy, sum_pi_squared
from corral.engine.losses import Objective
from corral.engine.model import build_model
from corral.engine.offload import Parking
from corral.engine.optim import adamw, learning_rate
from corral.engine.packed import PackedRow, pack
from corral.engine.rank import Rank
from corral.engine.recorded import RecordedTensor, recorded
from corral.engine.shard import autocast, reshard, shard, sync_gradients

log = logging.getLogger(__name__)

_FLOAT_FIELDS = (
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "values"),
    *("rollout_is_weights", "sequence_log_ratio", "sequence_advantage", "selected"),
    *("scores", "rewards", "advantages", "returns"),
)


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step. `stats` are this rank's sums; `grad_norm` is of the whole model, before clipping.

    skipped: the gradient was not finite, so weights and optimizer state are as before. gradients: by parameter, reduced
    over the ranks and not clipped, when they were to be recorded.
    """

    stats: dict[str, float]
    grad_norm: float
    skipped: bool
    gradients: dict[str, RecordedTensor] = field(default_factory=dict)


class Engine:
    """A model that scores and, if the plan has an optimizer, trains.

    `module` is the transformers model: plain in a world of one, else sharded.
    """

    def __init__(self, plan: EnginePlan, rank: Rank, *, horizon: int) -> None:
        """horizon: iterations of the whole run, for the schedule. Errors as `build_model`."""
        self.plan = plan
        self.horizon = horizon
        self.parallel = parallel(rank, plan.sp)
        self.device = device_of(rank)
        self._attend = kernels.kernel(self.device.type, plan.attention)
        self.module = shard(build_model(plan, rank), plan, self.parallel, self.device)
        self.optimizer = None if plan.optim is None else adamw(self.module.parameters(), plan.optim)
        self.iteration = 0
        self._parking = Parking(
            self.module,
            self.optimizer,
            device=self.device,
            host=torch.device("cpu"),
            parameters=plan.param_offload,
            optimizer_state=plan.optimizer_offload,
        )
        self._log_probs: Callable[..., tuple[Tensor, Tensor | None]] = log_probs_and_entropy
        if plan.use_torch_compile:
            self._log_probs = torch.compile(log_probs_and_entropy, dynamic=True)

    def loaded(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """Parameters (and optimizer state, if asked for) are on the device inside; every other call needs it."""
        return self._parking.loaded(optimizer=optimizer)

    # Scoring -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(
        self,
        batch: Batch,
        micro: list[list[int]],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Per-token results [R] on the CPU, complete on every rank of the sequence group.

        {"log_probs", and "entropy" and "sum_pi_squared" if asked for} of actor and reference, {"values"} of a critic
        (prediction before the token). micro: samples of each packed row; each sample of the batch in exactly one.
        """
        if sorted(i for row in micro for i in row) != list(range(len(batch))):
            raise ValueError("micro-batches have to hold each sample of the batch exactly once")
        self.module.eval()
        results: dict[str, Tensor] = {}
        for samples in micro:
            row, predicted = self._forward(batch, samples, temperature, entropy, squares=sum_pi_squared)
            for name, values in predicted.items():
                if name not in results:
                    results[name] = torch.zeros(batch.response_ids.numel(), dtype=values.dtype)
                results[name][row.token_at] = values.cpu()
        reshard(self.module)
        if self.parallel.sequence is not None:
            for values in results.values():  # each rank holds its own slices and zeros elsewhere
                dist.all_reduce(values, group=self.parallel.sequence.group)
        return results

    def _forward(
        self, batch: Batch, samples: list[int], temperature: float, entropy: bool, *, squares: bool = False
    ) -> tuple[PackedRow, dict[str, Tensor]]:
        """This rank's slice of one packed row, and the model's predictions [n] for it."""
        at = self.parallel
        row = pack(batch, samples, multiple=at.sp).slice(at.sp_rank, at.sp).to(self.device)
        inputs = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "use_cache": False,
            CONTEXT: PackedAttention(row.cu_seqlens, at.sequence, self._attend),
        }
        with autocast(self.plan, self.device, at):
            if self.plan.role == "critic":
                values = self.module(**inputs).logits[0, :, 0][row.predict_at]
                return row, {"values": at_least_float32(values)}
            # Only positions that predict a response token reach the vocabulary projection.
            logits = self.module(**inputs, logits_to_keep=row.predict_at).logits[0]
        log_probs, entropies = self._log_probs(logits, row.targets, temperature, entropy)
        predicted = {"log_probs": log_probs}
        if entropies is not None:
            predicted["entropy"] = entropies
        if squares:
            predicted["sum_pi_squared"] = sum_pi_squared(logits, temperature)
        return row, predicted

    # Training ------------------------------------------------------------------------------------------------------

    def train_step(
        self,
        batch: Batch,
        micro: list[list[int]],
        objective: Objective,
        *,
        temperature: float = 1.0,
        record: str = "none",
    ) -> TrainStep:
        """One optimizer step on the micro-batches of this rank (and of all other ranks, theirs).

        The objective holds global denominators and returns the loss of a slice, so losses, gradients and statistics
        of all micro-batches and ranks simply add up. record: none, summary or full, for the gradients.
        """
        if self.plan.optim is None or self.optimizer is None:
            raise ValueError(f"the {self.plan.role} was built without an optimizer")
        self.module.train()
        fields = _token_fields(batch, objective.token_weights(batch))
        sums: dict[str, Tensor] = {}
        for k, samples in enumerate(micro):
            sync_gradients(self.module, k == len(micro) - 1)
            row, predicted = self._forward(batch, samples, temperature, objective.needs_entropy)
            tokens = {name: value[row.token_at].to(self.device) for name, value in fields.items()}
            loss, stats = objective(predicted, tokens)
            # Sharded gradients are averaged over the world; the loss of the whole mini-batch is the sum over its ranks.
            with deterministic_backward(self.device):
                (loss * self.parallel.world).backward()  # type: ignore[no-untyped-call]
            for name, value in stats.items():
                sums[name] = sums[name] + value if name in sums else value
        own = own_tensors(self.module) if record != "none" else {}
        gradients = self._recorded({name: p.grad for name, p in own.items() if p.grad is not None}, record)
        grad_norm, skipped = self._step(self.plan.optim.clip_grad)
        return TrainStep({name: float(value) for name, value in sums.items()}, grad_norm, skipped, gradients)

    def _step(self, clip: float) -> tuple[float, bool]:
        """Clip, update and drop the gradients: (norm before clipping, whether the update was left out)."""
        assert self.optimizer is not None
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        total = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(full_tensor(total))
        finite = math.isfinite(norm)
        if finite:
            clip_grads_with_norm_(parameters, clip, total)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self.optimizer.step()
        else:
            log.warning("gradient norm of the %s is %s: this optimizer step is skipped", self.plan.role, norm)
        self.optimizer.zero_grad(set_to_none=True)
        return norm, not finite

    @property
    def lr(self) -> float:
        """Learning rate of the current iteration."""
        assert self.plan.optim is not None
        return learning_rate(self.plan.optim, self.iteration, self.horizon)

    def end_iteration(self) -> float:
        """Advance the schedule by one iteration; the learning rate of the next."""
        self.iteration += 1
        return self.lr

    # Weights -------------------------------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, one at a time, on every rank. Tied weights come once, under their first name."""
        return full_weights(self.module)

    def recorded_weights(self, record: str) -> dict[str, RecordedTensor]:
        """Weights by name, tied ones under their first. record: summary, or full, which gathers them."""
        return self._recorded(own_tensors(self.module), record)

    def _recorded(self, tensors: Mapping[str, Tensor], record: str) -> dict[str, RecordedTensor]:
        return recorded(tensors, whole=record == "full", rank=self.parallel.rank)

    def save(self, path: Path) -> None:
        """Write a transformers model folder with the tokenizer; rank 0 writes, `path` appears at once when complete."""
        write_folder(path, self.module, Path(self.plan.model.tokenizer_path), writer=self.parallel.rank == 0)
        if self.parallel.world > 1:
            dist.barrier()

    def save_checkpoint(self, folder: Path, contents: Sequence[str]) -> None:
        """Write model, optimizer, extra, hf_model, as asked for, into `folder`, which the caller publishes when whole.

        Raises InfraError when it cannot be written. Rank 0 writes; all ranks return when it has.
        """
        writer = self.parallel.rank == 0
        if "model" in contents:
            checkpoint.save_model(folder, self.module, writer=writer)
        if "optimizer" in contents and self.optimizer is not None:
            checkpoint.save_optimizer(folder, self.module, self.optimizer, writer=writer)
        if "extra" in contents and writer:
            checkpoint.save_extra(folder, self.iteration)
        if "hf_model" in contents:
            self.save(folder / "huggingface")
        elif self.parallel.world > 1:
            dist.barrier()

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from model, optimizer and extra in `folder`, written in any world. DataError: damaged, or another's."""
        checkpoint.load_model(folder, self.module)
        if self.optimizer is not None:
            checkpoint.load_optimizer(folder, self.module, self.optimizer)
        self.iteration = checkpoint.load_extra(folder)


def _token_fields(batch: Batch, weight: Tensor) -> Mapping[str, Tensor]:
    """What an objective may read about a token: mask, weight, and every float field that is set. All [R]."""
    present = {name: getattr(batch, name) for name in _FLOAT_FIELDS if getattr(batch, name) is not None}
    return {"mask": batch.response_mask, "weight": weight, **present}
