"""Where the samples that differ were computed: on one rank, one node, all ranks, or in certain mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.e2e.parity_records import Array, Facts, UpdateRecord

# Typical relative distance of what was rounded to a type once or a few times, and the type.
_ROUNDING = ((1e-9, 1e-5, "float32"), (5e-5, 5e-2, "bfloat16 or float16"))

_TAIL = 60  # the widest gap of what was only rounded, in typical ones


@dataclass(frozen=True)
class Spread:
    """bad [S] bool; rows [S]: data rows; ranks [S] of the split run, None where unknown or not of a rank."""

    bad: Array
    rows: Array
    ranks: Array | None
    role: str
    facts: Facts
    updates: Sequence[UpdateRecord]

    def words(self) -> list[str]:
        count = int(self.bad.sum())
        share = (
            f"all {count} samples differ" if count == self.bad.size else f"{count} of {self.bad.size} samples differ"
        )
        return [share, *self._ranks(), *self._mini_batches()]

    def _ranks(self) -> list[str]:
        if self.ranks is None:
            return []
        there = sorted({int(rank) for rank in self.ranks})
        hit = sorted({int(rank) for rank in self.ranks[self.bad]})
        if len(there) == 1:
            return []
        if hit == there:
            return ["they are on all ranks"]
        if len(hit) == 1:
            mine = int((self.ranks == hit[0]).sum())
            return [f"all of them were computed by {self._rank(hit[0])}: {int(self.bad.sum())} of the {mine} it had"]
        nodes = {rank // self.facts.devices_per_node for rank in hit} if self.facts.devices_per_node else set()
        if len(nodes) == 1:
            return [f"all of them were computed on node {nodes.pop()}"]
        return [f"they were computed by ranks {_listed(hit)}, and not by {_listed(sorted(set(there) - set(hit)))}"]

    def _rank(self, rank: int) -> str:
        sp = self.facts.sp.get(self.role, 1)
        return f"rank {rank}" if sp == 1 else f"ranks {rank} to {rank + sp - 1} (one sequence-parallel group)"

    def _mini_batches(self) -> list[str]:
        """The mini-batches of one role that hold all samples that differ, if others hold none."""
        hit = {int(row) for row in self.rows[self.bad]}
        for role in dict.fromkeys(update.role for update in self.updates):
            minis = [update for update in self.updates if update.role == role]
            touched = [update.k for update in minis if hit & set(update.rows)]
            if len(touched) == 1 < len(minis):
                return [f"all of them are in mini-batch {touched[0]} of the {role}"]
        return []


def precision(reference: Array, found: Array) -> list[str]:
    """Words when the entries that differ lie as far apart as rounding to a smaller type would put them."""
    import numpy as np

    a, b = reference.astype(np.float64), found.astype(np.float64)
    good = np.isfinite(a) & np.isfinite(b) & (a != 0)
    if not good.any():
        return []
    sizes = np.maximum(np.abs(a[good]), np.median(np.abs(a[good])))
    apart = np.abs(b[good] - a[good]) / sizes
    typical = float(np.median(apart))
    for low, high, kind in _ROUNDING:
        if low <= typical <= high and float(apart.max()) <= _TAIL * typical:
            return [f"typically by {typical:.0e} of their size, as rounding to {kind} would"]
    return []


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
