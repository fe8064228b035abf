"""Names, interfaces, ports, clocks, and whether each node reaches each other one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from corral.findings import Finding
from corral.workers import node_env
from corral.workers.doctor.asked import Asked, SeenNode
from corral.workers.interfaces import carrier, chosen, is_loopback


def network(nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    found = []
    hosts = len({node.address for node in nodes})
    for node in nodes:
        found += [_own_name(node, asked, hosts), *_interfaces(node, asked), *_ports(node)]
        found += [
            Finding("ports", True, f"port {port} free", "free", node=node.number)
            for port in asked.ports
            if port not in node.facts.ports
        ]
    return found + (clocks(nodes, asked.clock_skew) if len(nodes) > 1 else [])


def _own_name(node: SeenNode, asked: Asked, hosts: int) -> Finding:
    """gloo binds to what the host's own name resolves to, unless it is told an interface. Loopback will do where all
    nodes are on one host."""
    host, said = node.facts.host, node.facts.own_name
    told = (node.facts.variables | _derived(node, asked)).get("GLOO_SOCKET_IFNAME") is not None
    expected = f"host name {host} to resolve"
    local = is_loopback(node.address)
    fix = f"add {node.address} {host} to /etc/hosts of the node, or set GLOO_SOCKET_IFNAME where it is started"
    if isinstance(said, str):
        return Finding("dns", told or local, expected, said, fix, node.number)
    if hosts > 1 and not local and not told and all(is_loopback(address) for address in said):
        expected = f"host name {host} to resolve to an address that other nodes reach"
        return Finding("dns", False, expected, ", ".join(said), fix, node.number)
    return Finding("dns", True, expected, ", ".join(said), node=node.number)


def names(node: SeenNode, answers: Mapping[str, list[str] | str]) -> list[Finding]:
    """What the node says about the addresses of the others."""
    return [
        Finding(
            "dns", False, f"{name} to resolve", said, "name nodes by IP address, or repair the resolver", node.number
        )
        for name, said in answers.items()
        if isinstance(said, str)
    ]


def _interfaces(node: SeenNode, asked: Asked) -> list[Finding]:
    existing, variables = node.facts.interfaces, node.facts.variables
    own = carrier(existing, node.address)
    found = [
        Finding(
            "interface", True, f"an interface with {node.address}", own or "none: its address is translated on the way",
            node=node.number,
        )
    ]  # fmt: skip
    for backend in node_env.BACKENDS[asked.device]:
        variable = f"{backend}_SOCKET_IFNAME"
        value = variables.get(variable)
        if value not in (None, node_env.AUTO) and not chosen(backend, value, list(existing)):
            fix = f"set {variable}={own} there, or unset it" if own else f"unset {variable} there"
            there = ", ".join(sorted(existing))
            expected = f"{variable}={value[:80]} to name an interface"
            found.append(Finding("interface", False, expected, there, fix, node.number, kind="config"))
    found += [
        replace(each, node=node.number) for each in node_env.unfit(variables, existing, asked.device, asked.wanted)
    ]
    made = [f"{name}={value}" for name, value in _derived(node, asked).items() if value is not None]
    if made:
        found.append(Finding("derived", True, "variables of the node", ", ".join(made), node=node.number))
    return found


def _derived(node: SeenNode, asked: Asked) -> dict[str, str | None]:
    return node_env.derived(node.facts.variables, node.facts.interfaces, node.address, asked.device, asked.wanted)


def _ports(node: SeenNode) -> list[Finding]:
    return [
        Finding("ports", False, f"port {port} free", why, "end what listens there, or choose another port", node.number)
        for port, why in node.facts.ports.items()
    ]


def clocks(nodes: Sequence[SeenNode], bound: float) -> list[Finding]:
    """Each against the median of all, with ours among them, so that of two nodes the wrong one is named."""
    middle = statistics.median_low([0.0, *(node.skew for node in nodes)])
    return [
        Finding(
            "clock", abs(skew := node.skew - middle) - node.blur <= bound, f"at most {bound:g} s from the other nodes",
            f"{skew:+.3f} s", "set the node's clock, and let NTP keep it", node.number, value=round(skew, 6), unit="s",
        )
        for node in nodes
    ]  # fmt: skip


def connections(nodes: Sequence[SeenNode], problems: Mapping[tuple[int, int], str]) -> list[Finding]:
    """problems: why the first node of a pair cannot reach the second. One finding for a node that reaches all."""
    found = []
    for node in nodes:
        bad = {other: why for (one, other), why in problems.items() if one == node.number}
        for other, why in bad.items():
            fix = "open the ports between the two nodes (firewall, network policy, routes)"
            address = nodes[other].address
            expected = f"a connection to {address}"
            found.append(Finding("connect", False, expected, why, fix, node.number, peer=other))
        if not bad:
            found.append(Finding("connect", True, "a connection to every other node", "all", node=node.number))
    return found
