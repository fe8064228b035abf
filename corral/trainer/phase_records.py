"""phases/ of the run folder: what each step made, phase by phase, so that two runs can be compared sample by sample.

`phases/step-000001.safetensors` has samples, log-probs, values, advantages, and in mode full gradients and weights;
`phases/step-000001.json` the optimizer steps with their mini-batches and each rank's part, and norms. docs/engine.md
lists them. The JSON file appears last, so where it is, both are whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corral import atomic
from corral.batch import Batch
from corral.engine.recorded import RecordedTensor
from corral.engine.tensor_file import write_tensors
from corral.trainer.collection import Collected
from corral.trainer.run import Run
from corral.workers.group import WorkerGroup
from corral.workers.update import Update

VERSION = 1
_TOKEN_FIELDS = (
    *("rewards", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values"),
    *("sum_pi_squared", "rollout_is_weights", "advantages", "returns"),
)


def record_phases(run: Run, step: int, batch: Batch, collected: Collected, updates: Sequence[Update]) -> None:
    """Write both files of a finished step. batch: with everything that was computed for it.

    Raises InfraError when they cannot be written; what is there then is no JSON file.
    """
    roles = ["actor"] if run.plan.critic is None else ["critic", "actor"]
    weights = {role: run.group.recorded_weights(role) for role in roles}
    tensors = {**_samples(batch, collected), **_ranks(batch, collected, run.group)}
    for update in updates:
        for k, done in enumerate(update.steps):
            tensors.update(_whole(f"gradients/{update.role}/{k}", done.gradients))
    for role, held in weights.items():
        tensors.update(_whole(f"weights/{role}", held))
    document = {
        "version": VERSION,
        "step": step,
        "mode": run.plan.trainer.record_phases,
        "world": run.group.world,
        "updates": [record for update in updates for record in _updates(update)],
        "weights": [{"role": role, **record} for role, held in weights.items() for record in _norms(held)],
    }
    place = run.records.folder / "phases" / f"step-{step:06d}"
    _write(place.with_suffix(".safetensors"), tensors)
    atomic.write_text(place.with_suffix(".json"), json.dumps(document))


def _samples(batch: Batch, collected: Collected) -> dict[str, Tensor]:
    fields = {name: getattr(batch, name) for name in _TOKEN_FIELDS}
    return {
        **{name: getattr(batch, name) for name in ("row", "sample_index", "group", "prompt_lengths")},
        "response_lengths": batch.response_lengths,
        "prompt_ids": batch.prompt_ids,
        "response_ids": batch.response_ids,
        "response_mask": batch.response_mask,
        "scores": collected.values,
        **{name: value for name, value in fields.items() if value is not None},
    }


def _ranks(batch: Batch, collected: Collected, group: WorkerGroup) -> dict[str, Tensor]:
    """rank/ROLE: the first rank that computed each sample, -1 where none did."""
    ranks = {"rollout": collected.ranks}
    own = batch.old_log_probs is not batch.rollout_log_probs  # else bypass_mode took the engine's
    computed = {"actor": own, "ref": batch.ref_log_probs is not None, "critic": batch.values is not None}
    for role, did in computed.items():
        ranks[role] = group.inference_ranks(role, batch) if did else [-1] * len(batch)
    return {f"rank/{role}": torch.tensor(of, dtype=torch.int64) for role, of in ranks.items()}


def _whole(place: str, recorded: Mapping[str, RecordedTensor]) -> dict[str, Tensor]:
    return {f"{place}/{name}": tensor.whole for name, tensor in recorded.items() if tensor.whole is not None}


def _updates(update: Update) -> list[dict[str, Any]]:
    return [
        {
            "role": update.role,
            "k": k,
            "rows": done.rows,
            "denominators": asdict(done.denominators),
            "grad_norm": done.grad_norm,
            "skipped": done.skipped,
            "parts": [{"rank": rank, "stats": stats} for rank, stats in enumerate(done.parts)],
            "gradients": _norms(done.gradients),
        }
        for k, done in enumerate(update.steps)
    ]


def _norms(recorded: Mapping[str, RecordedTensor]) -> list[dict[str, Any]]:
    return [{"param": name, "norm": math.sqrt(tensor.squares), "dot": tensor.dot} for name, tensor in recorded.items()]


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with atomic.undone_on_failure(path, lambda: temporary.unlink(missing_ok=True)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, tensors, tensors.values())
        temporary.replace(path)
