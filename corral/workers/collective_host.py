"""Rank 0's side of the collective check: wait for every rank, ask for second measurements, say what was found."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from corral import atomic
from corral.engine.distributed import rendezvous
from corral.engine.rank import Rank
from corral.findings import Finding, failures
from corral.platform import platform
from corral.workers import collective_reports as words
from corral.workers.collective_reports import Report
from corral.workers.pair_judgement import TRIES, Limits, Speed, measured_again, pair_findings, slow_pairs
from corral.workers.pair_schedule import Pair

POLL = 0.5  # seconds: how soon a report that names a hang is looked at, while others are still awaited


@dataclass(frozen=True)
class Bounds:
    """Seconds. arrive: from rank 0 to the last rank; a node with a cold disk imports slowly. step: one collective, or
    one exchange of a pair. margin: beyond that, until whoever has not reported is taken to hang."""

    arrive: float = 300.0
    step: float = 30.0
    margin: float = 10.0


def shared(rank: Rank) -> Store:
    """The check's own part of the world's store, over a connection of its own: the other one may be waiting."""
    return PrefixStore("collective-check", rendezvous(rank).clone())  # type: ignore[attr-defined]


class Host:
    """Waits in a thread of rank 0, beside rank 0's own part in the check. nodes[r]: the node of rank r."""

    def __init__(self, rank: Rank, nodes: Sequence[int], file: Path, bounds: Bounds) -> None:
        self.error: BaseException | None = None
        self.findings: list[Finding] = []
        self._nodes, self._file, self._bounds = nodes, file, bounds
        facts = platform(rank.device)
        self._limits = Limits(facts.fast_enough, facts.of_no_use)
        self._started = time.monotonic()
        self._store = shared(rank)
        file.unlink(missing_ok=True)
        threading.Thread(target=self._run, name="collective-host", daemon=True).start()

    def _run(self) -> None:
        try:
            self.findings = self._findings()
            seconds = round(time.monotonic() - self._started, 3)
            result = {"version": 1, "seconds": seconds, "findings": [finding.as_dict() for finding in self.findings]}
            atomic.write_text(self._file, json.dumps(result, indent=1) + "\n")
        except BaseException as error:  # raised by rank 0's own part, which waits for the result
            self.error = error
            return
        told = [finding.as_dict() for finding in self.findings if not finding.ok or finding.check != "pair"]
        self._store.set("result", json.dumps(told))  # a large world has more good pairs than each rank has to hear of
        # Who still waits for one of these has only the result left to read.
        for release in ("arrived", *(f"again/{number}" for number in range(TRIES))):
            if not self._store.check([release]):
                self._store.set(release, "")

    def _findings(self) -> list[Finding]:
        facts = self._facts()
        world = len(self._nodes)
        if missing := [rank for rank in range(world) if rank not in facts]:
            return words.absent(missing, self._nodes, self._bounds.arrive)
        seconds = time.monotonic() - self._started
        found = [Finding("arrive", True, f"{world} ranks", f"{world} ranks", value=round(seconds, 3), unit="s")]
        found += words.odd_ones([facts[rank] for rank in range(world)], self._nodes)
        if failures(found):
            return _worst_first(found)
        self._store.set("arrived", "go")
        reports = self._reports("report")
        if stuck := words.stuck_ones(reports, self._nodes, self._bounds.step):
            return stuck
        for check in ("all_reduce", "all_to_all", "broadcast", "pair"):
            judged = words.wrong_ones(reports, check, self._nodes)
            found += judged if check != "pair" else failures(judged)
        return _worst_first(found if failures(found) else found + self._pairs(reports))

    def _pairs(self, reports: Mapping[int, Report]) -> list[Finding]:
        speeds = _speeds(reports)
        tries: list[dict[Pair, Speed]] = []
        while again := measured_again(speeds, tries, self._nodes, self._limits):
            number = len(tries)
            self._store.set(f"again/{number}", json.dumps(again))
            reports = self._reports(f"try-{number}")
            if stuck := words.stuck_ones(reports, self._nodes, self._bounds.step):
                return stuck
            tries.append(_speeds(reports))
        slow = slow_pairs(speeds, tries, self._nodes, self._limits)
        return pair_findings(speeds, slow, self._nodes, self._limits)

    def _facts(self) -> dict[int, dict[str, str]]:
        """Of all ranks that came in time."""
        names = [f"facts/{rank}" for rank in range(len(self._nodes))]
        wait_for(self._store, names, self._bounds.arrive)
        return {rank: json.loads(self._store.get(name)) for rank, name in enumerate(names) if self._store.check([name])}

    def _reports(self, kind: str) -> dict[int, Report]:
        """Of all ranks; once one of them says that it hangs, of those that report until the others must hang too."""
        left = {rank: f"{kind}/{rank}" for rank in range(len(self._nodes))}
        reports: dict[int, Report] = {}
        until = float("inf")
        while left and time.monotonic() < until:
            wait_for(self._store, list(left.values()), POLL)
            for rank, name in list(left.items()):
                if self._store.check([name]):
                    reports[rank] = Report.from_json(self._store.get(name))
                    del left[rank]
            if until == float("inf") and any(report.stuck for report in reports.values()):
                self._store.set("halt", "")
                until = time.monotonic() + self._bounds.step + self._bounds.margin
        return reports


def _speeds(reports: Mapping[int, Report]) -> dict[Pair, Speed]:
    return {(rank, peer): speed for rank, report in reports.items() for peer, speed in report.speeds.items()}


def wait_for(store: Store, names: list[str], seconds: float) -> bool:
    """Whether all keys are there within so many seconds."""
    try:
        store.wait(names, timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True


def _worst_first(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: finding.ok)
