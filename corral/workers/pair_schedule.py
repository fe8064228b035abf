"""Which pairs of ranks exchange data in which round, so that no rank is in two pairs at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Pair = tuple[int, int]
"""Two different ranks, the lower one first."""

ALL_PAIRS = 32
"""Largest world of which every pair is measured: rounds grow with the world, and pairs with its square."""


def schedule(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs; nodes[r] is the node of rank r.

    Up to ALL_PAIRS ranks: every pair once. Beyond: the first ranks of all nodes with each other, and each rank with
    the next one of its node.
    """
    if len(nodes) <= ALL_PAIRS:
        return tournament(range(len(nodes)))
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    neighbours = [list(itertools.pairwise(ranks)) for ranks in by_node.values()]
    within = [[pair for pairs in neighbours for pair in pairs[start::2]] for start in (0, 1)]
    between = tournament([ranks[0] for ranks in by_node.values()])
    return [pairs for pairs in (*within, *between) if pairs]


def tournament(players: Sequence[int]) -> list[list[Pair]]:
    """Everybody meets everybody once, in n - 1 rounds when n is even and in n when it is odd (circle method)."""
    seats: list[int | None] = [*players]
    if len(seats) % 2:
        seats.append(None)  # whoever meets nobody waits
    rounds = []
    for _ in range(len(seats) - 1):
        meetings = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def peers(rounds: Sequence[Sequence[Pair]], rank: int) -> list[int]:
    """Whom the rank meets, in order."""
    return [b if rank == a else a for pairs in rounds for a, b in pairs if rank in (a, b)]
