"""What a check before a run found: one line a fact, the same in the trainer's ranks, in `corral doctor`, in a job's
agent and in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """check: a slug such as packages, shm, clock, all_reduce, pair. node, rank, peer: where, as far as it has a place
    (peer: the other rank of a pair; the other node where there is no rank). expected and found: a few words.
    fix: what to do, "" when ok.
    value, unit: the number behind it where there is one (bandwidth in MiB/s, skew in s), for tables.
    kind: whose failure it is when it is one."""

    check: str
    ok: bool
    expected: str
    found: str
    fix: str = ""
    node: int | None = None
    rank: int | None = None
    peer: int | None = None
    value: float | None = None
    unit: str = ""
    kind: str = "infra"  # or config

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Finding:
        """Raises TypeError for fields that are not ours."""
        return cls(**fields)

    def where(self) -> str:
        """`node-1`, `node-1 to node-0`, `rank 5 on node-1`, `rank 2 to rank 5`, or "" when it is about everything."""
        node = "" if self.node is None else f"node-{self.node}"
        if self.rank is None:
            return node if self.peer is None else f"{node} to node-{self.peer}"
        if self.peer is not None:
            return f"rank {self.rank} to rank {self.peer}"
        return f"rank {self.rank} on {node}" if node else f"rank {self.rank}"

    def line(self) -> str:
        """`packages on node-1: expected torch 2.13.0, found torch 2.12.0; install the same version on every node`."""
        place = self.where()
        text = f"{self.check}{f' on {place}' if place else ''}: expected {self.expected}, found {self.found}"
        return " ".join(f"{text}; {self.fix}".split()) if self.fix and not self.ok else " ".join(text.split())


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are not ok, in their order."""
    return [finding for finding in findings if not finding.ok]


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The failure to report where there is room for one; None when all is well.

    What trying again cannot change comes first, then the node with the most failures, then the order.
    """
    bad = failures(findings)
    often = Counter(finding.node for finding in bad)
    often.update(finding.peer for finding in bad if finding.rank is None)
    del often[None]
    return min(bad, key=lambda finding: (finding.kind != "config", -often[finding.node]), default=None)
