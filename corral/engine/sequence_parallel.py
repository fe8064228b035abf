"""Ulysses sequence parallelism (Jacobs et al., 2023): ranks share a row by tokens and trade them for heads to attend.

Legend: P sequence-parallel degree, l tokens of one rank's slice, L = P·l, H and G query and key/value heads, D head
size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that hold the slices of one row, in the order of the slices."""

    group: dist.ProcessGroup
    degree: int

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, l, D], k, v [1, G, l, D] of a slice to q [1, H/P, L, D], k, v [1, G'/P, L, D] of the whole row.

        H has to be a multiple of P. Key/value heads are repeated to G' = lcm(G, P) heads, the fewest that P ranks can
        share; G' divides H because both G and P do.
        """
        parts = self.degree
        repeats = math.lcm(k.shape[1], parts) // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        length, size = q.shape[2], q.shape[3]
        by_rank = [x.reshape(parts, -1, length, size) for x in (q, k, v)]
        counts = [x.shape[1] for x in by_rank]
        swapped = _exchange(torch.cat(by_rank, dim=1), self.group)  # [P sources, heads, l, D]
        whole = swapped.transpose(0, 1).reshape(1, sum(counts), parts * length, size)
        q_out, k_out, v_out = torch.split(whole, counts, dim=1)
        return q_out, k_out, v_out

    def to_sequence(self, out: Tensor) -> Tensor:
        """[1, H/P, L, D] of the whole row to [1, l, H, D] of this rank's slice."""
        parts = self.degree
        _, heads, length, size = out.shape
        by_rank = out.reshape(heads, parts, length // parts, size).transpose(0, 1)
        swapped = _exchange(by_rank, self.group)  # [P head groups, H/P, l, D]
        return swapped.reshape(1, parts * heads, length // parts, size).transpose(1, 2)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row p of x [P, ...] goes to rank p; row p of the result came from rank p. Its own inverse."""
    result: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all whose gradient is the all-to-all back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
