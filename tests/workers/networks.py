"""Machines of a network, as network namespaces on a bridge, whose links can be made slow or cut. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType

SUBNET = "10.207.93.{}"  # of namespaces that reach nobody else, so that it clashes with nothing


def unavailable() -> str:
    """Why there can be no such network here; "" when there can."""
    if os.geteuid():
        return "only root may make network namespaces"
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"no {missing[0]} here: install iproute2"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


class Network:
    """Nodes 0, 1, ... with an interface eth0 each; the bridge is in a namespace too, so that all goes with them."""

    def __init__(self, nodes: int) -> None:
        mark = secrets.token_hex(3)
        self._switch = f"corral-{mark}-switch"
        self.namespaces = [f"corral-{mark}-{node}" for node in range(nodes)]
        self.address = SUBNET.format(1)

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self.namespaces):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run(
                "ip",
                "-n",
                name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{node}",
                "netns",
                self._switch,
            )
            run("ip", "-n", name, "addr", "add", f"{SUBNET.format(node + 1)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in (*self.namespaces, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def slow_node(self, node: int, rate: str) -> None:
        """Both directions of one node's link."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
        run("tc", "-n", self.namespaces[node], "qdisc", "add", "dev", "eth0", *shape)
        run("tc", "-n", self._switch, "qdisc", "add", "dev", f"port{node}", *shape)

    def slow_pair(self, node: int, other: int, rate: str) -> None:
        """What one node sends to another one."""
        tc = ("tc", "-n", self.namespaces[node])
        run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1")
        run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", "40gbit")
        run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:2", "htb", "rate", rate)
        run(
            *tc,
            "qdisc",
            "add",
            "dev",
            "eth0",
            "parent",
            "1:2",
            "tbf",
            "rate",
            rate,
            "burst",
            "32kb",
            "latency",
            "200ms",
        )
        target = f"{SUBNET.format(other + 1)}/32"
        run(
            *tc,
            "filter",
            "add",
            "dev",
            "eth0",
            "parent",
            "1:",
            "protocol",
            "ip",
            "u32",
            "match",
            "ip",
            "dst",
            target,
            "flowid",
            "1:2",
        )

    def cut_pair(self, node: int, other: int) -> None:
        """Nothing arrives between two nodes, and nobody is told."""
        for a, b in ((node, other), (other, node)):
            where = (SUBNET.format(b + 1), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            run("ip", "-n", self.namespaces[a], "neigh", "add", *where)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
