"""What a phase record keeps of gradients and weights: two sums of each tensor, and the tensors themselves if asked for.

The sums are over any part of a tensor, so ranks need not gather anything for them: the driver adds theirs up.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from corral.engine.export import full_tensor
from corral.engine.shard import own_rows

_BLOCK = 1 << 20  # elements looked at together, so that a large tensor needs little memory beside it


@dataclass(frozen=True)
class RecordedTensor:
    """This rank's part of Σ x² and of Σ s·x in float64, with s = ±1 fixed by the tensor's name and the element's place.

    The second sees a sign or an order that a norm does not. whole: all of it on the CPU, on rank 0 if asked for.
    """

    squares: float
    dot: float
    whole: Tensor | None = None


@torch.no_grad()
def recorded(tensors: Mapping[str, Tensor], *, whole: bool, rank: int) -> dict[str, RecordedTensor]:
    """Of each tensor. All ranks call it when there are several and whole is set; nothing is gathered when it is not."""
    out = {}
    for name, tensor in tensors.items():
        part, start = _own_part(tensor.detach(), rank)
        squares, dot = sums(name, part, start)
        gathered = full_tensor(tensor.detach()) if whole else None
        kept = None if gathered is None or rank else gathered.to("cpu", copy=True).contiguous()
        out[name] = RecordedTensor(squares, dot, kept)
    return out


def added(parts: Sequence[Mapping[str, RecordedTensor]]) -> dict[str, RecordedTensor]:
    """The records of all ranks, in their order, as those of the whole tensors."""
    return {
        name: RecordedTensor(sum(part[name].squares for part in parts), sum(part[name].dot for part in parts), of.whole)
        for name, of in parts[0].items()
    }


def sums(name: str, part: Tensor, start: int) -> tuple[float, float]:
    """(Σ x², Σ s·x) of the elements `part`, the first of which has the flat index `start` in the tensor `name`."""
    flat = part.reshape(-1)
    squares = dot = 0.0
    for first in range(0, flat.numel(), _BLOCK):
        block = flat[first : first + _BLOCK].cpu().double()
        squares += float(block.square().sum())
        dot += float((signs(name, start + first, block.numel()) * block).sum())
    return squares, dot


def signs(name: str, start: int, count: int) -> Tensor:
    """[count] float64 of ±1: a bit of splitmix64 (Steele, Lea and Flood, 2014) at each place, from `start` on."""
    key = zlib.crc32(name.encode()) << 32
    x = (torch.arange(start + 1, start + 1 + count, dtype=torch.int64) + key) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return 1.0 - 2.0 * ((x ^ _shifted(x, 31)) & 1).double()


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _own_part(tensor: Tensor, rank: int) -> tuple[Tensor, int]:
    """The elements this rank answers for, and the flat index of the first. Unsharded tensors are rank 0's."""
    if isinstance(tensor, DTensor):
        local, row = own_rows(tensor)
        return local, row * (tensor.numel() // max(1, tensor.shape[0]))
    return (tensor if rank == 0 else tensor.reshape(-1)[:0]), 0
