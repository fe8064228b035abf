"""Network interfaces of this machine, and what a *_SOCKET_IFNAME means by them.

Sent to nodes that may have another Corral, so only the standard library and psutil. Interfaces are a mapping of their
names to addresses with the length of their network: {"lo": ["127.0.0.1/8"], "eth0": ["10.0.0.2/24"]}.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import socket
from collections.abc import Mapping, Sequence

Interfaces = Mapping[str, Sequence[str]]


def interfaces() -> dict[str, list[str]]:
    """Those of this machine."""
    import psutil

    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        listed = found.setdefault(name, [])
        for each in addresses:
            if each.family == socket.AF_INET and each.netmask:
                listed.append(f"{each.address}/{ipaddress.ip_network(f'0.0.0.0/{each.netmask}').prefixlen}")
            elif each.family == socket.AF_INET6:
                listed.append(f"{each.address.partition('%')[0]}/128")
    return found


def carrier(existing: Interfaces, address: str) -> str | None:
    """The interface that an address belongs to; None: its address is translated on the way."""
    return next((name for name, each in existing.items() if any(_carries(one, address) for one in each)), None)


def chosen(backend: str, value: str, existing: Sequence[str]) -> list[str]:
    """The interfaces that a *_SOCKET_IFNAME stands for. gloo wants whole names; NCCL and HCCL take the beginnings of
    names, `=` before whole ones and `^` before those to leave out (NCCL user guide, environment variables)."""
    if backend == "GLOO":
        return [name for name in existing if name in value.split(",")]
    without = value.startswith("^")
    parts = value.removeprefix("^").removeprefix("=").split(",")
    exact = value.removeprefix("^").startswith("=")
    named = [n for n in existing if any(n == p if exact else fnmatch.fnmatchcase(n, f"{p}*") for p in parts)]
    return [name for name in existing if name not in named] if without else named


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _carries(address: str, wanted: str) -> bool:
    """Whether an interface with `address`, 127.0.0.1/8 as an example, takes packets for `wanted`. On loopback all of
    the network is its own."""
    try:
        own = ipaddress.ip_interface(address)
        return own.ip == ipaddress.ip_address(wanted) or (
            own.is_loopback and ipaddress.ip_address(wanted) in own.network
        )
    except ValueError:
        return False
