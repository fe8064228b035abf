"""How much memory models, gradients and optimizer state take, estimated from the headers of the weight files.

Not in it: activations, the keys and values of a rollout, temporary copies. What is offloaded counts too: it is in the
host's memory instead of the device's.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.config.plan import EnginePlan, Plan, RoleMemory

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
_HEAD = "lm_head.weight"
_LONGEST_HEADER = 100 << 20  # bytes; what the format allows


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model folder: all of them, and those of an output head that is not tied to the embeddings."""

    parameters: int
    head: int


def estimate(plan: Plan) -> tuple[RoleMemory, ...]:
    """One entry for each model a rank holds; empty when the weights of one of them are not in safetensors files.

    Parameters and Adam's two moments are sharded over the world. Gradients are not until the last micro-batch of an
    optimizer step: they are reduced once, so a rank holds those of the whole model while micro-batches accumulate.
    """
    out = []
    for engine in (plan.actor, plan.critic, plan.ref):
        if engine is None:
            continue
        sizes = folder_sizes(Path(engine.model.path))
        if sizes is None:
            return ()
        out.append(_held(engine, sizes, plan.topology.world))
    vllm = plan.rollout.vllm
    if plan.topology.world > 1 or vllm is not None:  # alone, the native engine decodes on the actor's own weights
        copy = out[0].parameters * _BYTES[vllm.dtype if vllm is not None else plan.actor.compute_dtype]
        copy //= plan.rollout.tensor_model_parallel_size
        out.append(RoleMemory("rollout", out[0].parameters, weights=copy, gradients=0, optimizer=0))
    return tuple(out)


def _held(engine: EnginePlan, sizes: Sizes, world: int) -> RoleMemory:
    # A critic has one output per token in the place of the vocabulary; its few numbers do not show here.
    parameters = sizes.parameters - sizes.head if engine.role == "critic" else sizes.parameters
    whole = parameters * _BYTES[engine.master_dtype]
    trained = engine.optim is not None
    return RoleMemory(
        role=engine.role,
        parameters=parameters,
        weights=whole // world,
        gradients=whole if trained else 0,
        optimizer=2 * whole // world if trained else 0,
    )


def folder_sizes(folder: Path) -> Sizes | None:
    """Parameters of the safetensors files of a model folder, from their headers; None when there are none to read."""
    shapes: dict[str, list[int]] = {}
    files = _weight_files(folder)
    for file in files:
        header = _header(file)
        if header is None:
            return None
        shapes |= {name: entry.get("shape", [0]) for name, entry in header.items() if name != "__metadata__"}
    if not files:
        return None
    head = math.prod(shapes.get(_HEAD, [0]))
    tied = _json(folder / "config.json").get("tie_word_embeddings", False)
    total = sum(math.prod(shape) for shape in shapes.values())
    return Sizes(total - head, 0) if tied else Sizes(total, head)


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load: those of the index, else the single one."""
    index = _json(folder / "model.safetensors.index.json").get("weight_map", {})
    names = sorted(set(index.values())) or ["model.safetensors"]
    files = [folder / name for name in names]
    return files if all(file.is_file() for file in files) else []


def _header(file: Path) -> dict[str, Any] | None:
    """The JSON header of a safetensors file: 8 bytes with its length, then name → dtype, shape, offsets."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        if length > _LONGEST_HEADER:
            return None
        return _mapping(stream.read(length)) or None


def _json(file: Path) -> dict[str, Any]:
    return _mapping(file.read_bytes()) if file.is_file() else {}


def _mapping(text: bytes) -> dict[str, Any]:
    """Empty when it is none: the engine says what is broken when it loads the folder."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
