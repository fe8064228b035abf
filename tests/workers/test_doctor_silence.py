"""Nodes that do not answer, or answer only some questions: the others are examined all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.findings import failures
from corral.workers.doctor.asked import Asked
from corral.workers.doctor.examine import examine
from corral.workers.doctor.places import Place, Silent
from corral.workers.doctor.probe import Probe


class SeveralHere:
    """Nodes that are all this process, but for the methods that are not answered: (number, method)."""

    def __init__(self, count: int, silent: set[tuple[int, str]]) -> None:
        self.places = [Place(number, f"n{number}", "127.0.0.1", 4) for number in range(count)]
        self._probes = [Probe() for _ in self.places]
        self._silent = silent
        self.asked: list[tuple[int, str]] = []

    def ask(self, method: str, args: Mapping[int, tuple[Any, ...]], bound: float) -> dict[int, Any]:
        self.asked += [(number, method) for number in args]
        return {
            number: Silent("gone") if (number, method) in self._silent else getattr(self._probes[number], method)(*each)
            for number, each in args.items()
        }


ASKED = Asked(nodes=3, devices=4, device="cpu", run_dir="/tmp", shm_mib=0, disk_mib=0)


def found(silent: set[tuple[int, str]], asked: Asked = ASKED, count: int = 3):
    places = SeveralHere(count, silent)
    nodes, findings = examine(places, asked)
    bad = failures(findings)
    return [node.number for node in nodes], [(each.check, each.node, each.peer, each.found) for each in bad], places


def test_all_answer():
    numbers, bad, places = found(set())
    assert (numbers, bad) == ([0, 1, 2], [])
    assert places.asked[-3:] == [(0, "close"), (1, "close"), (2, "close")]


def test_one_that_answers_nothing_is_not_asked_again():
    numbers, bad, places = found({(1, "facts")})
    assert (numbers, bad) == ([0, 2], [("answer", 1, None, "gone")])
    assert [method for number, method in places.asked if number == 1] == ["facts"]


def test_one_that_cannot_listen_is_named_by_the_others():
    _, bad, _ = found({(1, "listen")})
    said = "it cannot listen: gone"
    assert bad == [("connect", 0, 1, said), ("connect", 2, 1, said)]


def test_one_that_is_gone_before_the_end():
    _, bad, _ = found({(2, "reach"), (2, "resolve"), (2, "close")})
    assert bad == [("connect", 2, None, "gone")]


def test_a_node_too_few():
    _, bad, _ = found(set(), count=2)
    assert bad == [("nodes", None, None, "2 nodes")]


def test_nobody_answers():
    numbers, bad, _ = found({(0, "facts"), (1, "facts")}, Asked(None, None, "cpu", "/tmp"), count=2)
    assert (numbers, [each[:2] for each in bad]) == ([], [("answer", 0), ("answer", 1)])
