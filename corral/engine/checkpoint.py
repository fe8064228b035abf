"""What a model needs to train on: master weights, Adam's state and the schedule's position, in one folder per role.

Tensors are saved whole, so a checkpoint knows nothing of the world that wrote it: every rank reads its own rows of
each tensor, in any world. `model.safetensors` has the parameters and saved buffers, `optimizer.safetensors` has
exp_avg/NAME, exp_avg_sq/NAME and step/NAME of every parameter that was ever updated, `extra.json` the iterations done.
No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corral import atomic
from corral.engine.export import full_tensor, own_tensors
from corral.engine.shard import own_rows
from corral.engine.tensor_file import describe, described, tensors_of, write_tensors
from corral.errors import DataError

MODEL, OPTIMIZER, EXTRA = "model.safetensors", "optimizer.safetensors", "extra.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


def save_model(folder: Path, module: nn.Module, *, writer: bool) -> None:
    """Master weights. All ranks call it, one writes. Raises InfraError when it cannot be written."""
    _write(folder / MODEL, own_tensors(module), writer=writer)


def save_optimizer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, writer: bool) -> None:
    """Adam's moments and step counters. All ranks call it, one writes. Raises InfraError likewise."""
    _write(folder / OPTIMIZER, _state(module, optimizer), writer=writer)


def save_extra(folder: Path, iteration: int) -> None:
    """The schedule's position. Raises InfraError when it cannot be written."""
    atomic.write_text(folder / EXTRA, json.dumps({"iteration": iteration}))


@torch.no_grad()
def load_model(folder: Path, module: nn.Module) -> None:
    """Fill the module from save_model, rank by rank. DataError: the file is damaged or of another model."""
    path, own = folder / MODEL, own_tensors(module)
    with tensors_of(path) as file:
        found = set(file.keys())
        for name in sorted(own.keys() ^ found):
            where = "the checkpoint lacks it" if name in own else "this run's model has no such weight"
            raise DataError(f"{path} is of another model: {name}: {where}; resume with the model it was saved with")
        for name, tensor in own.items():
            _fill(tensor, file, name, path)


@torch.no_grad()
def load_optimizer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill Adam's state from save_optimizer; parameters never updated have none. DataError as load_model."""
    path = folder / OPTIMIZER
    with tensors_of(path) as file:
        left = set(file.keys())
        for name, parameter in own_tensors(module).items():
            keys = {kind: f"{kind}/{name}" for kind in (*_MOMENTS, _STEP)}
            if not left.intersection(keys.values()):
                continue
            for key in keys.values():
                if key not in left:
                    raise DataError(f"{path} lacks {key}; resume from another checkpoint")
            state: dict[str, Any] = {_STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
            state.update({kind: torch.zeros_like(parameter) for kind in _MOMENTS})
            for kind, key in keys.items():
                _fill(state[kind], file, key, path)
            optimizer.state[parameter] = state
            left -= set(keys.values())
        for key in sorted(left):
            raise DataError(f"{path} is of another model: it holds {key}; resume with the model it was saved with")


def load_extra(folder: Path) -> int:
    """Iterations done. DataError: the file is missing or damaged."""
    path = folder / EXTRA
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["iteration"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is missing or damaged; resume from another checkpoint") from error


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state under the names of the file."""
    out = {}
    for name, parameter in own_tensors(module).items():
        state = optimizer.state.get(parameter, {})
        out.update({f"{kind}/{name}": state[kind] for kind in (*_MOMENTS, _STEP) if kind in state})
    return out


def _write(path: Path, tensors: Mapping[str, Tensor], *, writer: bool) -> None:
    whole = _whole(tensors.values())
    if not writer:
        for _ in whole:  # gathering takes every rank
            pass
        return
    with atomic.undone_on_failure(path, lambda: path.unlink(missing_ok=True)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, whole)


@torch.no_grad()
def _whole(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield full_tensor(tensor.detach())


def _fill(tensor: Tensor, file: Any, name: str, path: Path) -> None:
    """This rank's part of one tensor of the file."""
    part = file.get_slice(name)
    there, here = described(part.get_dtype(), part.get_shape()), describe(tensor)
    if there != here:
        raise DataError(
            f"{path}: {name} is {there}, this run's model has {here}; resume with the model and types it has"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    local, start = own_rows(tensor)
    if len(local):  # with more ranks than rows some have none
        local.copy_(part[start : start + len(local)])
