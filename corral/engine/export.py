"""Weights out of an engine: to a rollout engine, tensor by tensor, or to a model folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from corral import atomic
from corral.errors import InfraError

# What a model folder holds beside the model: everything but weights and the config, which the model writes itself.
_BESIDE = (".json", ".txt", ".jinja", ".model", ".py")


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective), or a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, as this rank holds them. Tied ones come once, under their first name."""
    seen: set[int] = set()
    own = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own


@torch.no_grad()
def full_weights(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same, whole, one at a time. Every rank has to exhaust it."""
    for name, tensor in own_tensors(module).items():
        yield name, full_tensor(tensor.detach())


def write_folder(path: Path, module: PreTrainedModel, tokenizer: Path, *, writer: bool) -> None:
    """A transformers folder at `path` (replaced if it exists): safetensors in master dtype, config, tokenizer files.

    All ranks call it, one writes. It is written beside `path` and renamed, so a folder at `path` is always complete.
    Raises InfraError when it cannot be written; what was at `path` before is still there then.
    """
    weights = {name: tensor.cpu() for name, tensor in full_weights(module) if writer}
    if not writer:
        return
    try:
        with atomic.new_folder(path) as fresh:
            for file in sorted(tokenizer.iterdir()):
                if (
                    file.is_file()
                    and file.suffix in _BESIDE
                    and file.name != "config.json"
                    and "index" not in file.name
                ):
                    shutil.copyfile(file, fresh / file.name)
            module.save_pretrained(fresh, state_dict=weights)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise InfraError(f"cannot write the model to {path}: {reason}; free space or choose another folder") from error
