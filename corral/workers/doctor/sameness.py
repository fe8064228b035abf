"""What has to be the same on all nodes: Python, packages, Corral, the source. The odd one out is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from corral.findings import Finding
from corral.workers.doctor.asked import Asked, SeenNode

_OF_NO_MATTER = frozenset({"pip", "setuptools", "wheel"})
NAMED = 3  # packages that are named in one finding
_ABSENT = "none"


def sameness(nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    """One finding a node and check."""
    found = _python(nodes) + _packages(nodes) + _corral(nodes)
    return found + (_source(nodes, asked) if asked.source is not None else [])


def usual(values: Sequence[str | None]) -> str | None:
    """The most frequent one; among equals the first, so that of two nodes the first counts."""
    return Counter(values).most_common(1)[0][0]


def _python(nodes: Sequence[SeenNode]) -> list[Finding]:
    return _compared("python", nodes, lambda node: node.facts.python, "install the same Python on every node")


def _corral(nodes: Sequence[SeenNode]) -> list[Finding]:
    def version(node: SeenNode) -> str | None:
        digest, number = node.facts.corral, node.facts.packages.get("corral", "of no version")
        return digest if digest is None or digest.startswith("!") else f"{number} with digest {digest[:12]}"

    return _compared("corral", nodes, version, "install the same Corral on every node")


def _compared(check: str, nodes: Sequence[SeenNode], of: Callable[[SeenNode], str | None], fix: str) -> list[Finding]:
    expected = usual([of(node) for node in nodes])
    return [
        Finding(
            check, (found := of(node)) == expected and found is not None and not found.startswith("!"),
            expected or "one", (found or _ABSENT).removeprefix("! "), fix, node.number,
        )
        for node in nodes
    ]  # fmt: skip


def _packages(nodes: Sequence[SeenNode]) -> list[Finding]:
    """Packages of the user count too: what a job imports is not known here."""
    names = {name for node in nodes for name in node.facts.packages} - _OF_NO_MATTER
    expected = {name: usual([node.facts.packages.get(name) for node in nodes]) for name in sorted(names)}
    return [_packages_of(node, expected) for node in nodes]


def _packages_of(node: SeenNode, expected: Mapping[str, str | None]) -> Finding:
    own = node.facts.packages
    other = [name for name in expected if own.get(name) != expected[name]]
    if not other:
        count = f"{len(expected)} packages"
        return Finding("packages", True, f"the same {count}", count, node=node.number)
    said = [f"{name} {expected[name] or _ABSENT}" for name in other[:NAMED]]
    found = [f"{name} {own.get(name, _ABSENT)}" for name in other[:NAMED]]
    more = [f"{len(other) - NAMED} more"] if len(other) > NAMED else []
    return Finding(
        "packages", False, ", ".join(said), ", ".join(found + more),
        "install the same versions on every node", node.number,
    )  # fmt: skip


def _source(nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    expected = asked.source_digest or usual([node.facts.source for node in nodes]) or ""
    fix = f"put the same files into {asked.source} on every node, or share the folder"
    return [
        Finding(
            "source", (found := node.facts.source or _ABSENT) == expected, f"digest {expected[:12]}",
            found.removeprefix("! ") if found.startswith("!") else f"digest {found[:12]}", fix, node.number,
        )
        for node in nodes
    ]  # fmt: skip
