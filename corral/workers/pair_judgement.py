"""When a pair of ranks counts as slow, and whose fault that is. Pure: numbers in, findings out.

The rule, in two passes, as a busy machine makes any single measurement slow now and then:
1. Every pair is measured once, several at a time. Suspect is a pair below a quarter of the upper quartile of its kind
   (within a node, between nodes) and below the floor, or one that is too slow to be of use.
2. Suspects are measured again, up to TRIES times, each alone, in turn with the fastest other pairs of their kind. Slow
   is a pair that each time stayed below a quarter of the median of those, and below the floor; or, each time, below
   what is of use. Where all pairs of a node, of two nodes, or of a rank within its node are suspect, a few stand for
   all of them.
The quartile and not the median: with one bad node of three, two thirds of the pairs are slow.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.findings import Finding
from corral.workers.pair_schedule import Pair

RATIO = 4.0  # times slower than the rest of its kind
TRIES = 3
CONTROLS = 3  # pairs of the same kind a suspect is compared with
SUSPECTS = 8  # of the slowest suspects, so many are measured again
STAND_INS = 3  # so many of them for all pairs of a node, of two nodes, or of a rank within its node


@dataclass(frozen=True)
class Speed:
    """latency: seconds one way. bandwidth: MiB/s one way, while the same goes the other way."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Limits:
    """MiB/s. floor: a pair at least so fast is never slow, whatever the others do. least: below it is always slow."""

    floor: float
    least: float


def suspects(speeds: Mapping[Pair, Speed], nodes: Sequence[int], limits: Limits) -> list[Pair]:
    """What has to be measured again, the slowest first. nodes[r]: the node of rank r."""
    usual = {
        between: _upper_quartile([s.bandwidth for pair, s in speeds.items() if _between(pair, nodes) == between])
        for between in (False, True)
    }
    found = [p for p, s in speeds.items() if _is_slow(s.bandwidth, usual[_between(p, nodes)], limits)]
    return sorted(found, key=lambda pair: (speeds[pair].bandwidth, pair))


def measured_again(
    speeds: Mapping[Pair, Speed], tries: Sequence[Mapping[Pair, Speed]], nodes: Sequence[int], limits: Limits
) -> list[Pair]:
    """What the next try of the second pass measures: the suspects that were slow in all tries so far, and the fastest
    pairs of their kinds. Nothing when no suspect is left, or after TRIES. Few stand for a set that is suspect whole."""
    found = suspects(speeds, nodes, limits)
    chosen: list[Pair] = []
    if len(tries) < TRIES:
        wholes = _wholes(speeds, found, nodes)
        for pair in found:
            enough = any(pair in pairs and sum(p in pairs for p in chosen) >= STAND_INS for pairs in wholes)
            if len(chosen) < SUSPECTS and not enough:
                chosen.append(pair)
    left = [pair for pair in chosen if _slow_in_all(pair, tries, found, nodes, limits)]
    for between in sorted({_between(pair, nodes) for pair in left}):
        others = [p for p in speeds.keys() - set(found) if _between(p, nodes) == between]
        left += sorted(others, key=lambda pair: (-speeds[pair].bandwidth, pair))[:CONTROLS]
    return left


def slow_pairs(
    speeds: Mapping[Pair, Speed], tries: Sequence[Mapping[Pair, Speed]], nodes: Sequence[int], limits: Limits
) -> dict[Pair, Speed]:
    """Pairs that are slow, with the best speed they had when alone. tries: those of the second pass, in order."""
    found = suspects(speeds, nodes, limits)
    measured = [pair for pair in found if tries and pair in tries[0]]
    slow = {
        pair: max((one[pair] for one in tries), key=lambda speed: speed.bandwidth)
        for pair in measured
        if len(tries) == TRIES and _slow_in_all(pair, tries, found, nodes, limits)
    }
    for pairs in _wholes(speeds, found, nodes):
        own = [pair for pair in measured if pair in pairs]
        if own and all(pair in slow for pair in own):
            slow = dict.fromkeys(pairs, max((slow[pair] for pair in own), key=lambda speed: speed.bandwidth)) | slow
    return slow


def _wholes(speeds: Mapping[Pair, Speed], found: Sequence[Pair], nodes: Sequence[int]) -> list[set[Pair]]:
    """Sets of pairs with one cause, all of which are suspect: of a node with all others, of two nodes, of a rank
    within its node."""
    suspect = set(found)
    groups = (
        *_of_nodes(speeds, nodes).values(),
        *_of_links(speeds, nodes).values(),
        *_of_ranks(speeds, nodes).values(),
    )
    return [set(pairs) for pairs in groups if suspect.issuperset(pairs)]


def _of_nodes(speeds: Mapping[Pair, Speed], nodes: Sequence[int]) -> dict[int, list[Pair]]:
    """Node → its pairs with other nodes."""
    groups: dict[int, list[Pair]] = defaultdict(list)
    for pair in speeds:
        if _between(pair, nodes):
            for node in _nodes(pair, nodes):
                groups[node].append(pair)
    return groups


def _of_links(speeds: Mapping[Pair, Speed], nodes: Sequence[int]) -> dict[tuple[int, int], list[Pair]]:
    """Two nodes → the pairs between them."""
    groups: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in speeds:
        if _between(pair, nodes):
            groups[_nodes(pair, nodes)].append(pair)
    return groups


def _of_ranks(speeds: Mapping[Pair, Speed], nodes: Sequence[int]) -> dict[int, list[Pair]]:
    """Rank → its pairs within its node."""
    groups: dict[int, list[Pair]] = defaultdict(list)
    for pair in speeds:
        if not _between(pair, nodes):
            for rank in pair:
                groups[rank].append(pair)
    return groups


def _slow_in_all(
    pair: Pair, tries: Sequence[Mapping[Pair, Speed]], found: Sequence[Pair], nodes: Sequence[int], limits: Limits
) -> bool:
    """Each against the pairs of its kind in the same try that were no suspects."""
    kind = _between(pair, nodes)
    for one in tries:
        controls = [speed.bandwidth for p, speed in one.items() if _between(p, nodes) == kind and p not in found]
        usual = statistics.median(controls) if controls else 0.0
        if pair not in one or not _is_slow(one[pair].bandwidth, usual, limits):
            return False
    return True


def _is_slow(bandwidth: float, usual: float, limits: Limits) -> bool:
    return bandwidth < limits.least or (bandwidth < usual / RATIO and bandwidth < limits.floor)


def _upper_quartile(values: Sequence[float]) -> float:
    """The smallest value that three quarters of them do not exceed; 0 of none."""
    return sorted(values)[math.ceil(0.75 * len(values)) - 1] if values else 0.0


def _nodes(pair: Pair, nodes: Sequence[int]) -> tuple[int, int]:
    a, b = sorted((nodes[pair[0]], nodes[pair[1]]))
    return a, b


def _between(pair: Pair, nodes: Sequence[int]) -> bool:
    return nodes[pair[0]] != nodes[pair[1]]


# Words ----------------------------------------------------------------------------------------------------------------


def pair_findings(
    speeds: Mapping[Pair, Speed], slow: Mapping[Pair, Speed], nodes: Sequence[int], limits: Limits
) -> list[Finding]:
    """What is slow first, in as few places as explain it: a node, two nodes, a rank, a pair. Then each other pair."""
    usual = {
        between: _upper_quartile([s.bandwidth for p, s in speeds.items() if _between(p, nodes) == between])
        for between in (False, True)
    }
    left = dict(slow)
    found = _slow_nodes(speeds, left, nodes, usual[True], limits)
    found += _slow_links(speeds, left, nodes, usual[True], limits)
    found += _slow_ranks(speeds, left, nodes, usual, limits)
    for (a, b), speed in sorted(left.items()):
        where = _where(a, b, nodes)
        fix = f"check the network between node-{nodes[a]} and node-{nodes[b]}" if nodes[a] != nodes[b] else (
            f"check what connects the two devices of node-{nodes[a]}, or take the node out"
        )  # fmt: skip
        found.append(_pair_finding((a, b), speed, nodes, limits, usual, f"{_rate(speed)} {where}", fix))
    good = [(pair, speed) for pair, speed in sorted(speeds.items()) if pair not in slow]
    found += [
        _pair_finding(pair, speed, nodes, limits, usual, f"{_rate(speed)} {_where(*pair, nodes)}")
        for pair, speed in good
    ]
    return found


def _slow_nodes(
    speeds: Mapping[Pair, Speed], left: dict[Pair, Speed], nodes: Sequence[int], usual: float, limits: Limits
) -> list[Finding]:
    """Nodes that are slow with every other node, of which there are at least two; their pairs are taken out of left."""
    found = []
    bad: set[Pair] = set()
    for node, own in sorted(_of_nodes(speeds, nodes).items()):
        others = {other for pair in own for other in _nodes(pair, nodes)} - {node}
        if len(others) >= 2 and all(pair in left for pair in own):
            bad |= set(own)
            best = max((left[pair] for pair in own), key=lambda speed: speed.bandwidth)
            found.append(
                Finding(
                    "node_bandwidth", False, _expected(usual, limits),
                    f"at most {_rate(best)} with each of the {len(others)} other nodes",
                    f"check the network interface, cable and switch port of node-{node}, or take it out",
                    node=node, value=round(best.bandwidth, 3), unit="MiB/s",
                )
            )  # fmt: skip
    for pair in bad:
        del left[pair]
    return found


def _slow_links(
    speeds: Mapping[Pair, Speed], left: dict[Pair, Speed], nodes: Sequence[int], usual: float, limits: Limits
) -> list[Finding]:
    """Two nodes all of whose common pairs are slow, when these are several."""
    found = []
    for (a, b), pairs in sorted(_of_links(speeds, nodes).items()):
        if len(pairs) > 1 and all(pair in left for pair in pairs):
            pair = min(pairs)
            text = f"{_rate(left[pair])} {_where(*pair, nodes)}, as on all {len(pairs)} pairs of these nodes"
            fix = f"check the network between node-{a} and node-{b}"
            found.append(_pair_finding(pair, left[pair], nodes, limits, {True: usual}, text, fix))
            for each in pairs:
                del left[each]
    return found


def _slow_ranks(
    speeds: Mapping[Pair, Speed], left: dict[Pair, Speed], nodes: Sequence[int],
    usual: Mapping[bool, float], limits: Limits,
) -> list[Finding]:  # fmt: skip
    """Ranks that are slow with every rank of their node, of which there are at least two."""
    found = []
    bad: set[Pair] = set()
    for rank, own in sorted(_of_ranks(speeds, nodes).items()):
        if len(own) >= 2 and all(pair in left for pair in own):
            bad |= set(own)
            best = max((left[pair] for pair in own), key=lambda speed: speed.bandwidth)
            found.append(
                Finding(
                    "rank_bandwidth", False, _expected(usual[False], limits),
                    f"at most {_rate(best)} with each of the {len(own)} other ranks of its node",
                    f"check its device, or take node-{nodes[rank]} out",
                    node=nodes[rank], rank=rank, value=round(best.bandwidth, 3), unit="MiB/s",
                )
            )  # fmt: skip
    for pair in bad:
        del left[pair]
    return found


def _pair_finding(
    pair: Pair, speed: Speed, nodes: Sequence[int], limits: Limits, usual: Mapping[bool, float], text: str,
    fix: str = "",
) -> Finding:  # fmt: skip
    between = _between(pair, nodes)
    return Finding(
        "pair", not fix, _expected(usual[between], limits), text, fix,
        node=None if between else nodes[pair[0]], rank=pair[0], peer=pair[1],
        value=round(speed.bandwidth, 3), unit="MiB/s",
    )  # fmt: skip


def _expected(usual: float, limits: Limits) -> str:
    least = max(limits.least, min(limits.floor, usual / RATIO))
    return f"{_mib(least)} or more" + (f" ({_mib(usual)} is usual)" if usual > least else "")


def _where(a: int, b: int, nodes: Sequence[int]) -> str:
    return f"within node-{nodes[a]}" if nodes[a] == nodes[b] else f"between node-{nodes[a]} and node-{nodes[b]}"


def _rate(speed: Speed) -> str:
    return f"{_mib(speed.bandwidth)}, {speed.latency * 1e3:.3g} ms"


def _mib(value: float) -> str:
    return f"{value:.0f} MiB/s" if value >= 10 else f"{value:.2g} MiB/s"
