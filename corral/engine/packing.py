"""How samples are spread over data-parallel ranks and cut into micro-batches.

Pure integer work on lengths, done by the driver, so every rank is told what to run and all ranks run the same number of
micro-batches (each is a set of collectives). How samples are spread never changes a result, only speed and memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from corral.config.plan import MicroBatches

PADDING_LENGTH = 2
"""Tokens of one no-op sample: `Batch.padded` gives it one prompt and one response token."""


@dataclass(frozen=True)
class Split:
    """`shares[dp_rank][micro]` lists the samples of one micro-batch as indices into `batch.padded(padding)`.

    Every rank has the same number (at least one) of micro-batches and none of them is empty. `oversized` are the
    samples that are longer than the token budget by themselves; each of them has a micro-batch of its own.
    """

    padding: int
    shares: list[list[list[int]]]
    oversized: list[int]


def workload(length: int) -> int:
    """Cost of one sample of `length` tokens in arbitrary units: a linear part (projections) and attention."""
    return 24576 * length + length * length


def balance(workloads: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Items spread over `parts` so that the sums are close (Karmarkar and Karp, 1982, largest differencing).

    Deterministic; part k holds ascending indices. With `equal_counts` the sizes differ by at most one. Without, no
    part is empty as long as there are `parts` items of positive workload.
    """
    if parts < 1:
        raise ValueError(f"cannot balance over {parts} parts")
    order = sorted(range(len(workloads)), key=lambda i: (-workloads[i], i))
    seeds = [[[i]] for i in order]
    if equal_counts:
        # Each seed gives one item to every part; the items missing in the last seed weigh nothing, so merging by sums
        # still leaves every part with the items of all the other seeds.
        seeds = [[[i] for i in order[at : at + parts]] for at in range(0, len(order), parts)]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for tie, seed in enumerate(seeds):
        heap.append(_entry(tie, [(sum(workloads[i] for i in items), items) for items in seed], parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        heapq.heappush(heap, _entry(tie, [(a + b, x + y) for (a, x), (b, y) in pairs], parts))
    merged = heap[0][2] if heap else []
    return [sorted(items) for _, items in merged] or [[] for _ in range(parts)]


def _entry(tie: int, sums: list[tuple[int, list[int]]], parts: int) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """Heap entry of a partial solution: (minus its spread, tie breaker, parts by descending sum)."""
    padded = sorted(sums + [(0, [])] * (parts - len(sums)), key=lambda part: (-part[0], part[1]))
    return padded[-1][0] - padded[0][0], tie, padded


def split(lengths: Sequence[int], dp: int, limits: MicroBatches, balance: bool = True) -> Split:
    """Samples of `lengths` tokens spread over `dp` ranks and cut into equally many micro-batches per rank.

    dynamic (limits.token_budget): no micro-batch exceeds the budget, except a sample that does so alone. The count is
    the largest any rank needs. static (limits.samples): at most so many samples per micro-batch. `balance` spreads by
    workload, else every rank gets a contiguous run of samples. Missing samples are filled with no-op ones.
    """
    shares = _spread(lengths, dp, limits, balance)
    cuts = [_first_cut(share, lengths, limits) for share in shares]
    count = max(1, *(len(cut) for cut in cuts))
    padded = list(lengths)
    out = []
    for share, cut in zip(shares, cuts, strict=True):
        missing = max(0, count - len(share))
        fillers = list(range(len(padded), len(padded) + missing))
        padded += [PADDING_LENGTH] * missing
        micro = _refine(cut + [[i] for i in fillers], count, padded, limits)
        # The heaviest first: memory peaks at once, and ranks that wait for each other run similar work.
        out.append(sorted(micro, key=lambda group: (-sum(workload(padded[i]) for i in group), group)))
    budget = limits.token_budget
    oversized = [i for i, length in enumerate(lengths) if budget is not None and length > budget]
    return Split(padding=len(padded) - len(lengths), shares=out, oversized=oversized)


def _spread(lengths: Sequence[int], dp: int, limits: MicroBatches, by_workload: bool) -> list[list[int]]:
    """Samples of each rank. Static micro-batches count samples, so there the ranks get equally many."""
    if by_workload:
        return balance([workload(n) for n in lengths], dp, equal_counts=limits.samples is not None)
    return [list(range(len(lengths) * r // dp, len(lengths) * (r + 1) // dp)) for r in range(dp)]


def _first_cut(share: list[int], lengths: Sequence[int], limits: MicroBatches) -> list[list[int]]:
    """As few micro-batches as a simple rule finds: first-fit decreasing under a budget, runs of samples without."""
    if limits.token_budget is None:
        if limits.samples is None:
            raise ValueError("micro-batches need a token budget or a number of samples")
        return [share[at : at + limits.samples] for at in range(0, len(share), limits.samples)]
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(share, key=lambda i: (-lengths[i], i)):
        fits = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if fits is None:
            bins.append([i])
            room.append(limits.token_budget - lengths[i])
        else:
            bins[fits].append(i)
            room[fits] -= lengths[i]
    return [sorted(group) for group in bins]


def _refine(cut: list[list[int]], count: int, lengths: Sequence[int], limits: MicroBatches) -> list[list[int]]:
    """The samples of `cut` in `count` micro-batches: balanced if that keeps the limit, else the cut, divided."""
    budget = limits.token_budget
    alone = [group for group in cut if budget is not None and lengths[group[0]] > budget]
    rest = [group for group in cut if group not in alone]
    items = sorted(i for group in rest for i in group)
    parts = count - len(alone)
    if parts == 0:
        return alone
    work = [workload(lengths[i]) for i in items]
    even = [[items[i] for i in part] for part in balance(work, parts, equal_counts=limits.samples is not None)]
    if budget is None or all(sum(lengths[i] for i in group) <= budget for group in even):
        return alone + even
    while len(rest) < parts:
        largest = max(rest, key=len)
        rest.remove(largest)
        rest += [largest[::2], largest[1::2]]
    return alone + rest
