"""What the two runs of a parity check left, as numbers: metrics.jsonl, plan.json, and the phases of every step.

Reading never raises on what a run wrote: what cannot be read is an `Unreadable` with the reason, and so a failing row.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ValidationError

from corral.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_STEP = re.compile(r"step-(\d+)\.json$")


class Unreadable(Exception):
    """One line: what of the records cannot be read, and why."""


class Summary(BaseModel):
    """A tensor as two numbers: L2 norm, and the product with a fixed vector of ±1, which sees order and signs."""

    param: str
    norm: float
    dot: float
    role: str = ""  # of a weight; a gradient's is its update's


class Part(BaseModel):
    """Sums of one rank: over all ranks they add up to the mini-batch's statistics."""

    rank: int
    stats: dict[str, float]


class UpdateRecord(BaseModel):
    """One optimizer step. rows: data rows of its mini-batch. k: which of the role's steps in this iteration."""

    role: str
    k: int
    rows: list[int] = []
    denominators: dict[str, float] = {}
    grad_norm: float | None = None
    skipped: bool = False
    parts: list[Part] = []
    gradients: list[Summary] = []

    @property
    def name(self) -> str:
        return f"{self.role}/{self.k}"

    def sums(self) -> dict[str, float]:
        """Statistics of the mini-batch: the sums over all ranks."""
        names = dict.fromkeys(name for part in self.parts for name in part.stats)
        return {name: sum(part.stats.get(name, 0.0) for part in self.parts) for name in names}


class _Index(BaseModel):
    version: int
    step: int
    mode: str
    world: int
    updates: list[UpdateRecord] = []
    weights: list[Summary] = []


class PhaseRecords:
    """One step of one run. Tensors are read one at a time, when asked for."""

    def __init__(self, index_file: Path) -> None:
        """Raises Unreadable: a file is missing, truncated, or not of this format."""
        from safetensors import SafetensorError, safe_open

        tensors_file = index_file.with_suffix(".safetensors")
        try:
            self.index = _Index.model_validate(json.loads(index_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(f"{index_file.name} cannot be read: {_reason(error)}") from None
        if self.index.version != 1:
            raise Unreadable(f"{index_file.name} is of version {self.index.version}; this Corral reads version 1")
        try:
            opened: Any = safe_open(tensors_file, framework="np")
            self._file = opened
            self.names: frozenset[str] = frozenset(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise Unreadable(f"{tensors_file.name} cannot be read: {_reason(error)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str) -> Array:
        """Raises Unreadable: there is none, or numpy has no such numbers."""
        from safetensors import SafetensorError

        try:
            array: Array = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Unreadable(f"{name} cannot be read: {_reason(error)}") from None
        except (TypeError, AttributeError):
            kind = self._file.get_slice(name).get_dtype()
            raise Unreadable(
                f"{name} is of type {kind}, which cannot be compared; train in float32 or float64"
            ) from None
        return array

    def under(self, prefix: str) -> dict[str, str]:
        """Parameter: name of its tensor, for `gradients/actor/0/` or `weights/actor/`."""
        return {name.removeprefix(prefix): name for name in sorted(self.names) if name.startswith(prefix)}


@dataclass(frozen=True)
class Facts:
    """How a run was split. sp: sequence-parallel degree by role; missing where plan.json does not say. record_phases:
    what it was to leave of each step."""

    world: int = 1
    devices_per_node: int = 0
    sp: dict[str, int] = field(default_factory=dict)
    dp: dict[str, int] = field(default_factory=dict)
    record_phases: str = "none"


@dataclass(frozen=True)
class RunRecords:
    """One side. metrics: by step, None for a line that cannot be read. phases: index file by step."""

    folder: Path
    facts: Facts
    metrics: dict[int, dict[str, Any]]
    phases: dict[int, Path]
    trouble: list[str]

    def phase(self, step: int) -> PhaseRecords:
        """Raises Unreadable."""
        if step not in self.phases:
            raise Unreadable("not recorded")
        return PhaseRecords(self.phases[step])


def read_run(folder: Path) -> RunRecords:
    """All of a run's records; `trouble` holds a line for each thing that is missing or broken."""
    trouble: list[str] = []
    metrics = _metrics(folder / "metrics.jsonl", trouble)
    phases = {
        int(found[1]): path for path in sorted(folder.glob("phases/*.json")) if (found := _STEP.search(path.name))
    }
    return RunRecords(folder, _facts(folder / "plan.json"), metrics, phases, trouble)


def need_libraries() -> None:
    """Raises ConfigError when this installation has no numpy or safetensors."""
    try:
        import numpy
        import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"parity needs numpy and safetensors ({error}): pip install 'corral[train]'") from None
    assert numpy


def _metrics(file: Path, trouble: list[str]) -> dict[int, dict[str, Any]]:
    """By step; of two lines of one step (a resumed run) the later one."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        trouble.append(f"metrics.jsonl cannot be read: {_reason(error)}")
        return {}
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            steps[int(values["step"])] = {name: value for name, value in values.items() if name != "step"}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            trouble.append(f"metrics.jsonl: line {number} of {len(lines)} cannot be read")
    if not steps:
        trouble.append("metrics.jsonl holds no step")
    return steps


def _facts(file: Path) -> Facts:
    """What helps to say where; a plan that cannot be read only makes hints shorter."""
    try:
        plan = json.loads(file.read_bytes())
        roles = {role: plan[role] for role in ("actor", "ref", "critic") if plan.get(role)}
        return Facts(
            world=int(plan["topology"]["world"]),
            devices_per_node=int(plan["topology"]["devices_per_node"]),
            sp={role: max(1, int(engine["sp"])) for role, engine in roles.items()},
            dp={role: max(1, int(engine["dp"])) for role, engine in roles.items()},
            record_phases=str((plan.get("trainer") or {}).get("record_phases") or "none"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Facts()


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200]
