"""The checks of the nodes, from questions to findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from corral.findings import Finding
from corral.workers.doctor import network as net
from corral.workers.doctor.asked import Asked, NodeFacts, SeenNode
from corral.workers.doctor.places import Place, Places, Silent
from corral.workers.doctor.sameness import sameness
from corral.workers.doctor.supplies import supplies

TRIPS = 5  # round trips to a node's clock, of which the fastest counts
REACH = 3.0  # seconds a node may take to send data to another and get it back


def examine(places: Places, asked: Asked) -> tuple[list[SeenNode], list[Finding]]:
    """The nodes that answered, and what was found, in the order of the checks."""
    found = [_count(places.places, asked)]
    answers = places.ask("facts", {place.number: (asked.for_probe(),) for place in places.places}, asked.answer)
    nodes = []
    for place in places.places:
        answer = answers[place.number]
        if isinstance(answer, Silent):
            found.append(_silence(place, answer, asked.answer))
            continue
        facts = NodeFacts.of(answer)
        skew, blur = _skew(places, place.number, asked.answer) if len(places.places) > 1 else (0.0, 0.0)
        nodes.append(SeenNode(place.number, place.name, place.address, place.devices, facts, skew, blur, place.others))
    if nodes:
        found += sameness(nodes, asked) + supplies(nodes, asked) + net.network(nodes, asked)
    if len(nodes) > 1:
        found += _between(places, nodes, asked)
    return nodes, found


def _count(places: Sequence[Place], asked: Asked) -> Finding:
    wanted = asked.nodes or 1
    fix = "start the missing nodes with `ray start --address=HEAD:PORT`, or ask for fewer"
    return Finding("nodes", len(places) >= wanted, _nodes(wanted), _nodes(len(places)), fix)


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _silence(place: Place, answer: Silent, bound: float) -> Finding:
    fix = "look at the node: it has to run Python with psutil"
    return Finding("answer", False, f"an answer within {bound:g} s", answer.why, fix, place.number)


def _skew(places: Places, number: int, bound: float) -> tuple[float, float]:
    """Seconds by which a node's clock is ahead of ours, taken at the middle of the fastest round trip, and half of
    that trip (Cristian 1989: Probabilistic clock synchronization)."""
    best = (0.0, float("inf"))
    for _ in range(TRIPS):
        sent, began = time.time(), time.monotonic()
        theirs = places.ask("clock", {number: ()}, bound)[number]
        half = (time.monotonic() - began) / 2
        if not isinstance(theirs, Silent) and half < best[1]:
            best = (theirs - (sent + half), half)
    return best


def _between(places: Places, nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    """Each node listens, and each other one sends it data; names come first, as they explain the rest."""
    found = []
    others = {node.number: [other.address for other in nodes if other is not node] for node in nodes}
    asking = {number: (sorted(set(names)),) for number, names in others.items()}
    answers = places.ask("resolve", asking, asked.answer)
    for node in nodes:
        if not isinstance(answers[node.number], Silent):
            found += net.names(node, answers[node.number])
    listening = places.ask("listen", {node.number: (node.address,) for node in nodes}, asked.answer)
    problems: dict[tuple[int, int], str] = {}
    targets: list[tuple[int, str, int]] = []
    for number, answer in listening.items():
        if isinstance(answer, Silent):
            problems |= {(other, number): f"it cannot listen: {answer.why}" for other in others if other != number}
        else:
            targets.append((number, *answer))
    questions: dict[int, tuple[Any, ...]] = {
        node.number: ([target for target in targets if target[0] != node.number], REACH) for node in nodes
    }
    reached = places.ask("reach", questions, asked.answer)
    for number, answer in reached.items():
        if isinstance(answer, Silent):
            found.append(Finding("connect", False, "connections to the other nodes", answer.why, node=number))
        else:
            problems |= {(number, other): why for other, why in answer.items()}
    places.ask("close", {node.number: () for node in nodes}, asked.answer)
    silent = {number for number, answer in reached.items() if isinstance(answer, Silent)}
    return found + net.connections([node for node in nodes if node.number not in silent], problems)
