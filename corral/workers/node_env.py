"""Variables that differ by node: derived on the node itself, from its interfaces and the address Ray knows it by.

Without them gloo, NCCL and HCCL choose an interface by themselves, and on a node that has several (a pod's and the
fabric's, Docker's bridge) two nodes may choose ones that do not meet. What is set already wins.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from corral.findings import Finding
from corral.workers.interfaces import Interfaces, carrier, chosen, is_loopback

AUTO = "auto"  # as the value of one of the variables: derive it, also where a node has a single interface
BACKENDS = {"cpu": ("GLOO",), "cuda": ("GLOO", "NCCL"), "npu": ("GLOO", "HCCL")}
"""Whose *_SOCKET_IFNAME counts, by device."""
HCCL_IF_IP, RANK_TABLE_FILE = "HCCL_IF_IP", "RANK_TABLE_FILE"
INTERFACES = tuple(f"{name}_SOCKET_IFNAME" for name in ("NCCL", "HCCL", "GLOO", "TP"))
NODE_OWN = (HCCL_IF_IP, *INTERFACES)
"""Variables that are never taken over from another node as they are."""


def wanted_of(environ: Mapping[str, str]) -> dict[str, str]:
    """What a driver asks of all nodes. HCCL_IF_IP is not among it: it can be right on one node only."""
    return {name: environ[name] for name in INTERFACES if environ.get(name)}


def derived(
    environ: Mapping[str, str], existing: Interfaces, address: str, device: str, wanted: Mapping[str, str]
) -> dict[str, str | None]:
    """What ranks of the node add to its environment; None: they leave the variable out. What the node sets wins.

    *_SOCKET_IFNAME (those of the device's backends, and TP_SOCKET_IFNAME of torch's RPC): as the driver wants it, where
    the node has such an interface; else the interface of `address`, where the node has several, or the value is "auto".
    HCCL_IF_IP, on npu: the address of the interface that HCCL_SOCKET_IFNAME names, else `address`. Nothing is derived
    on a node that is known by a loopback address, whose ranks all are on this machine, or by an address that no
    interface of it has; "auto" is then left out.
    """
    own = None if is_loopback(address) else carrier(existing, address)
    several = len(_outside(existing)) > 1
    made: dict[str, str | None] = {}
    for backend in (*BACKENDS[device], "TP"):
        variable = f"{backend}_SOCKET_IFNAME"
        value = environ.get(variable) or wanted.get(variable)
        taken_over = not environ.get(variable) and value not in (None, AUTO)
        if taken_over and chosen(backend, str(value), list(existing)):
            made[variable] = value
        elif value == AUTO or (several and own is not None and (taken_over or not value)):
            made[variable] = own
    if device == "npu" and environ.get(HCCL_IF_IP, AUTO) == AUTO:
        named = made.get("HCCL_SOCKET_IFNAME") or environ.get("HCCL_SOCKET_IFNAME") or AUTO
        at = address if named in (AUTO, own) else _address_of(chosen("HCCL", named, list(existing)), existing)
        if own is not None and at is not None:
            made[HCCL_IF_IP] = at
        elif HCCL_IF_IP in environ:
            made[HCCL_IF_IP] = None
    return made


def unfit(environ: Mapping[str, str], existing: Interfaces, device: str, wanted: Mapping[str, str]) -> list[Finding]:
    """What is set on a node, or wanted of it, that ranks cannot work with."""
    found = _not_there(environ, existing, device, wanted)
    if device != "npu":
        return found
    if table := environ.get(RANK_TABLE_FILE):
        fix = "unset it where the node is started: HCCL would take its ranks from that file"
        found.append(Finding("rank_table", False, f"no {RANK_TABLE_FILE}", table[:80], fix, kind="config"))
    at = environ.get(HCCL_IF_IP) or AUTO
    if at != AUTO and at not in _addresses(existing):
        expected = f"{HCCL_IF_IP}={at[:80]} to be an address of the node"
        there = ", ".join(_addresses(_outside(existing))) or "none that others reach"
        fix = "unset it: it is derived on each node"
        found.append(Finding("interface", False, expected, there, fix, kind="config"))
    return found


def _not_there(
    environ: Mapping[str, str], existing: Interfaces, device: str, wanted: Mapping[str, str]
) -> list[Finding]:
    """Interfaces that the driver wants and a node does not have, though it has several to choose from."""
    found, there = [], sorted(_outside(existing))
    for backend in BACKENDS[device]:
        variable = f"{backend}_SOCKET_IFNAME"
        value = wanted.get(variable, AUTO)
        missing = value != AUTO and not environ.get(variable) and not chosen(backend, value, list(existing))
        if missing and len(there) > 1:
            expected = f"{variable}={value[:80]}, which the driver has, to name an interface"
            fix = "set it where the node is started, or unset it for the driver"
            found.append(Finding("interface", False, expected, ", ".join(there), fix, kind="config"))
    return found


def _outside(existing: Interfaces) -> dict[str, list[str]]:
    """Interfaces that lead to other machines, with the addresses that do."""
    reaching = {name: [one for one in each if _reaches_out(one)] for name, each in existing.items()}
    return {name: each for name, each in reaching.items() if each}


def _reaches_out(address: str) -> bool:
    own = ipaddress.ip_interface(address)
    return not own.is_loopback and not own.is_link_local


def _addresses(existing: Interfaces) -> list[str]:
    return [one.partition("/")[0] for each in existing.values() for one in each]


def _address_of(named: Sequence[str], existing: Interfaces) -> str | None:
    """Of the first of these interfaces that has one: HCCL speaks IPv4 unless it is told otherwise."""
    found = [one.partition("/")[0] for name in named for one in existing[name] if _reaches_out(one)]
    return next((one for one in found if ":" not in one), found[0] if found else None)
