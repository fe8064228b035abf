"""Run folders with phases as the trainer records them, small and made up: a change makes one side differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from corral.e2e.case import Parity
from corral.e2e.parity import compare
from corral.e2e.result import ParityReport

TIGHT = Parity(args=[], rtol=1e-6, atol=1e-9)

SAMPLES, PER_PROMPT, WORLD, SP = 8, 2, 8, 2
SHAPES = {"embed.weight": (4, 3), "layers.0.norm.weight": (3,), "head.weight": (3, 2)}
ROLES = ("critic", "actor")
TOKEN_FLOATS = (*("rewards", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns"),)


@dataclass
class Step:
    """What is about to be written; changes work on it in place."""

    number: int
    tensors: dict[str, np.ndarray]
    updates: list[dict[str, Any]]
    metrics: dict[str, Any]

    def update(self, role: str, k: int) -> dict[str, Any]:
        return next(u for u in self.updates if (u["role"], u["k"]) == (role, k))


Change = Callable[[Step], None]


def write_run(
    folder: Path,
    change: Change = lambda step: None,
    *,
    world: int = WORLD,
    steps: int = 2,
    mode: str = "full",
    dtype: str = "float64",
) -> Path:
    """The same run for the same arguments. world 1 is the reference."""
    (folder / "phases").mkdir(parents=True)
    lines = []
    for number in range(1, steps + 1):
        step = _step(number, world, np.dtype(dtype))
        change(step)
        if mode != "none":
            _write_phases(folder / "phases" / f"step-{number:06d}.json", step, world, mode)
        lines.append(json.dumps({"step": number, **step.metrics}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    sp = SP if world > 1 else 1
    engine = {"sp": sp, "dp": world // sp}
    topology = {"world": world, "devices_per_node": 4 if world > 1 else 1}
    plan = {"topology": topology, "actor": engine, "critic": engine, "ref": engine}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def _step(number: int, world: int, dtype: np.dtype[Any]) -> Step:
    random = np.random.default_rng(number)
    prompts = [random.integers(1, 50, random.integers(2, 5)) for _ in range(SAMPLES // PER_PROMPT)]
    responses = [random.integers(1, 50, random.integers(3, 6)) for _ in range(SAMPLES)]
    tokens = sum(map(len, responses))
    order = np.arange(SAMPLES)
    spread = order if world > 1 else 0 * order
    tensors = {
        "row": 10 + order // PER_PROMPT,
        "sample_index": order % PER_PROMPT,
        "group": order // PER_PROMPT,
        "prompt_lengths": np.array([len(prompts[i // PER_PROMPT]) for i in order]),
        "response_lengths": np.array([len(response) for response in responses]),
        "prompt_ids": np.concatenate([prompts[i // PER_PROMPT] for i in order]),
        "response_ids": np.concatenate(responses),
        "response_mask": np.ones(tokens, dtype=bool),
        "scores": random.normal(size=SAMPLES),
        **{name: random.normal(size=tokens).astype(dtype) for name in TOKEN_FLOATS},
        "rank/rollout": spread,
        **{f"rank/{role}": spread // SP * SP for role in ("actor", "ref", "critic")},
    }
    updates = []
    for role in ROLES:
        for k in range(2):
            rows = [int(row) for row in tensors["row"][4 * k : 4 * k + 4]]
            totals = {"loss": float(random.normal()), "share": float(random.random())}
            parts = [{"rank": r, "stats": {n: t / world for n, t in totals.items()}} for r in range(world)]
            updates.append(
                {
                    "role": role,
                    "k": k,
                    "rows": rows,
                    "denominators": {"tokens": tokens, "samples": 4},
                    "grad_norm": float(random.random()),
                    "skipped": False,
                    "parts": parts,
                }
            )
            tensors |= {f"gradients/{role}/{k}/{p}": random.normal(size=s).astype(dtype) for p, s in SHAPES.items()}
        tensors |= {f"weights/{role}/{p}": random.normal(size=s).astype(dtype) for p, s in SHAPES.items()}
    metrics = {"actor/loss": float(random.normal()), "critic/loss": float(random.normal()), "timing_s/step": world}
    return Step(number, tensors, updates, metrics)


def _write_phases(file: Path, step: Step, world: int, mode: str) -> None:
    for update in step.updates:
        prefix = f"gradients/{update['role']}/{update['k']}/"
        update["gradients"] = [_summary(step, prefix, param) for param in SHAPES]
    weights = [{"role": role, **_summary(step, f"weights/{role}/", param)} for role in ROLES for param in SHAPES]
    index = {"version": 1, "step": step.number, "mode": mode, "world": world}
    file.write_text(json.dumps({**index, "updates": step.updates, "weights": weights}))
    kept = {
        name: np.ascontiguousarray(array)
        for name, array in step.tensors.items()
        if mode == "full" or not name.startswith(("gradients/", "weights/"))
    }
    save_file(kept, file.with_suffix(".safetensors"))


def _summary(step: Step, prefix: str, param: str) -> dict[str, Any]:
    flat = step.tensors[prefix + param].reshape(-1).astype(np.float64)
    signs = np.where(np.arange(flat.size) % 3 == 0, -1.0, 1.0)
    return {"param": param, "norm": float(np.linalg.norm(flat)), "dot": float(flat @ signs)}


def compared(reference: Path, folder: Path, change: Change, parity: Parity = TIGHT, **kind: object) -> ParityReport:
    """A changed run of eight ranks against the reference."""
    return compare(reference, write_run(folder / "many", change, **kind), parity, folder / "divergence")


def add(name: str, amount: float, at: int = 0, number: int = 1) -> Change:
    """Adds to one entry of one tensor of one step."""

    def change(step: Step) -> None:
        if step.number == number:
            step.tensors[name] = step.tensors[name].copy()
            step.tensors[name].reshape(-1)[at] += amount

    return change


def at_step(number: int, change: Callable[[Step], object]) -> Change:
    return lambda step: change(step) if step.number == number else None


def drop_sample(step: Step) -> None:
    step.tensors["scores"] = step.tensors["scores"][:-1]
