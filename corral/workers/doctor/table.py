"""What was found, for a person: the bad node first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from corral.findings import Finding, failures, worst
from corral.workers.doctor.asked import SeenNode

_WIDEST = 60


def lines(nodes: Sequence[SeenNode], found: Sequence[Finding], took: float) -> list[str]:
    bad = failures(found)
    first = worst(found)
    order = [first, *(each for each in bad if each is not first)] if first is not None else []
    said = [f"FAILED  {finding.line()}" for finding in order if finding is not None]
    said += [""] if said else []
    said += [f"node-{node.number}  {node.name} at {node.address}, {_devices(node)}" for node in nodes]
    said += ["", *_passed([each for each in found if each.ok]), ""]
    count = f"{len(found)} checks on {len(nodes)} node{'s' * (len(nodes) != 1)} in {took:.1f} s"
    return [*said, f"{count}: " + (f"{len(bad)} failed" if bad else "all passed")]


def _devices(node: SeenNode) -> str:
    return f"Python {node.facts.python}" + (f", {node.devices} devices" if node.devices is not None else "")


def _passed(found: Sequence[Finding]) -> list[str]:
    """A row for what a check found, whoever found it; rows of a check stand together."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for finding in found:
        rows[finding.check][_short(finding.found)].append(finding.where())
    wide = max(map(len, rows), default=0)
    return [
        f"ok  {check:<{wide}}  {text}{_of(places)}" for check, texts in rows.items() for text, places in texts.items()
    ]


def _of(places: Sequence[str]) -> str:
    named = list(dict.fromkeys(place for place in places if place))
    if not named:
        return ""
    return f"  ({', '.join(named)})" if len(named) <= 4 else f"  ({named[0]} and {len(named) - 1} more)"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
