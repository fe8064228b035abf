"""What ranks report of the collective check, and what that says about them. Pure: reports in, findings out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from corral.findings import Finding
from corral.workers.pair_judgement import Speed
from corral.workers.pair_schedule import Pair

STEPS = ("connect", "all_reduce", "all_to_all", "broadcast", "pair")
"""In the order in which a rank takes them, so that who is in an earlier one than the rest keeps the rest waiting."""

LOOK = "look at its log; if the node is in order, its network or its device is not"


@dataclass(frozen=True)
class Report:
    """One rank. took: check → seconds. wrong: check → ranks from which something wrong came. speeds: peer → speed, of
    the pairs it leads.
    stuck: the step that did not end, with its peer where it has one; error: what it raised instead, "" for a hang.
    unreachable: ranks to which not even a plain connection came about, looked for after a hang only."""

    took: Mapping[str, float] = field(default_factory=dict)
    wrong: Mapping[str, Sequence[int]] = field(default_factory=dict)
    speeds: Mapping[int, Speed] = field(default_factory=dict)
    stuck: str = ""
    peer: int | None = None
    error: str = ""
    unreachable: Sequence[int] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        fields = json.loads(text)
        return cls(**fields | {"speeds": {int(peer): Speed(**speed) for peer, speed in fields["speeds"].items()}})


def absent(missing: Sequence[int], nodes: Sequence[int], seconds: float) -> list[Finding]:
    """Ranks that never came; a node none of whose ranks came is named once."""
    found = []
    gone = [node for node in sorted(set(nodes)) if all(r in missing for r, n in enumerate(nodes) if n == node)]
    for node in gone:
        found.append(
            Finding(
                "arrive", False, f"its {nodes.count(node)} ranks within {seconds:g} s", "none of them",
                f"look at logs/node-{node}, and whether node-{node} can reach rank 0", node=node,
            )
        )  # fmt: skip
    for rank in missing:
        if nodes[rank] not in gone:
            log = f"logs/node-{nodes[rank]}/rank-{rank}.log"
            found.append(
                Finding(
                    "arrive", False, f"it within {seconds:g} s of rank 0", "nothing heard from it", f"look at {log}",
                    node=nodes[rank], rank=rank,
                )
            )  # fmt: skip
    return found


def odd_ones(facts: Sequence[Mapping[str, str]], nodes: Sequence[int]) -> list[Finding]:
    """Ranks that have other facts than most; on a tie, others than rank 0. One good finding when there are none."""
    found = []
    for name in sorted({name for each in facts for name in each}):
        held = [each.get(name, "nothing") for each in facts]
        counts = Counter(held)
        usual = max(counts, key=lambda value: (counts[value], value == held[0]))
        for rank, value in enumerate(held):
            if value != usual:
                fix = f"give node-{nodes[rank]} what the other nodes have, or take it out"
                found.append(Finding(f"same_{name}", False, usual, value, fix, nodes[rank], rank))
    if not found:
        words = ", ".join(f"{name} {value}" for name, value in sorted(facts[0].items()))
        found.append(Finding("same_facts", True, f"the same on all {len(nodes)} ranks", words))
    return found


def stuck_ones(reports: Mapping[int, Report], nodes: Sequence[int], seconds: float) -> list[Finding]:
    """Who keeps the others waiting, from the reports of a check that did not end; a rank without one is at fault."""
    silent = [rank for rank in range(len(nodes)) if rank not in reports]
    halted = {rank: report for rank, report in reports.items() if report.stuck}
    first = min((report.stuck for report in halted.values()), key=STEPS.index, default="")
    if silent:
        words = f"none, while others wait in {first}: it hangs or was stopped"
        return [Finding("answer", False, f"a report within {seconds:g} s", words, LOOK, nodes[r], r) for r in silent]
    if not halted:
        return []
    halted = {rank: report for rank, report in halted.items() if report.stuck == first}
    if found := _unreachable(halted, nodes, first):
        return found
    if first == "pair":
        return _stuck_pairs(halted, nodes, seconds)
    words = next((report.error for report in halted.values() if report.error), "") or f"no end within {seconds:g} s"
    if len(halted) == len(nodes):
        fix = "check the backend's network interface and that nodes may connect to each other on any port"
        return [Finding(first, False, f"an end within {seconds:g} s on all {len(nodes)} ranks", words, fix)]
    return [
        Finding(first, False, f"an end within {seconds:g} s", report.error or words, LOOK, nodes[rank], rank)
        for rank, report in sorted(halted.items())
    ]


def _unreachable(halted: Mapping[int, Report], nodes: Sequence[int], step: str) -> list[Finding]:
    pairs = sorted({(min(a, b), max(a, b)) for a, report in halted.items() for b in report.unreachable})
    return [
        Finding(
            step, False, "a connection", f"none {_between(pair, nodes)}",
            f"let node-{nodes[pair[0]]} and node-{nodes[pair[1]]} connect to each other on any port",
            rank=pair[0], peer=pair[1],
        )
        for pair in pairs
    ]  # fmt: skip


def _stuck_pairs(halted: Mapping[int, Report], nodes: Sequence[int], seconds: float) -> list[Finding]:
    """Two ranks that wait for each other; others wait for one of these."""
    waits = {rank: report.peer for rank, report in halted.items() if report.peer is not None}
    mutual = {(min(a, b), max(a, b)) for a, b in waits.items() if waits.get(b) == a}
    pairs: set[Pair] = mutual or {(min(a, b), max(a, b)) for a, b in waits.items()}
    found = []
    for a, b in sorted(pairs):
        error = next((halted[r].error for r in (a, b) if r in halted and halted[r].error), "")
        found.append(
            Finding(
                "pair", False, f"an exchange within {seconds:g} s",
                f"{error or 'none'} {_between((a, b), nodes)}",
                f"check the network between node-{nodes[a]} and node-{nodes[b]}" if nodes[a] != nodes[b] else LOOK,
                node=nodes[a] if nodes[a] == nodes[b] else None, rank=a, peer=b,
            )
        )  # fmt: skip
    return found


def wrong_ones(reports: Mapping[int, Report], check: str, nodes: Sequence[int]) -> list[Finding]:
    """Whose values were wrong in one check; one good finding when nobody's were."""
    seen: dict[int, list[int]] = {}  # owner → who saw it
    for rank, report in sorted(reports.items()):
        for owner in report.wrong.get(check, ()):
            seen.setdefault(owner, []).append(rank)
    if not seen:
        took = max((report.took.get(check, 0.0) for report in reports.values()), default=0.0)
        return [Finding(check, True, "the known values", f"right on all {len(nodes)} ranks", value=took, unit="s")]
    watchers = {rank for ranks in seen.values() for rank in ranks}
    if len(seen) > 1 and len(watchers) == 1:  # one rank gets it all wrong: the fault is where it arrives
        (rank,) = watchers
        return [_wrong(check, f"wrong ones on arrival from ranks {_list(seen)}", nodes, rank)]
    found = []
    for owner, ranks in sorted(seen.items()):
        if owner < 0:
            found.append(_wrong(check, f"a wrong sum of right parts on ranks {_list(ranks)}", nodes, None))
        elif len(ranks) == 1 and ranks[0] != owner and check == "pair":
            found.append(_wrong(check, "other bytes than were sent", nodes, min(owner, ranks[0]), max(owner, ranks[0])))
        else:
            found.append(_wrong(check, f"wrong ones from it on ranks {_list(ranks)}", nodes, owner))
    return found


def _wrong(check: str, text: str, nodes: Sequence[int], rank: int | None, peer: int | None = None) -> Finding:
    fix = "take its node out and check memory, device and network interface" if rank is not None else (
        "check the versions of torch and of the backend's library"
    )  # fmt: skip
    node = None if rank is None or peer is not None else nodes[rank]
    return Finding(check, False, "the known values", text, fix, node, rank, peer)


def _between(pair: Pair, nodes: Sequence[int]) -> str:
    a, b = (nodes[rank] for rank in pair)
    return f"within node-{a}" if a == b else f"between node-{a} and node-{b}"


def _list(ranks: Mapping[int, object] | Sequence[int]) -> str:
    shown = sorted(ranks)
    return ", ".join(map(str, shown[:8])) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
