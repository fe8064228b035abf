"""One cluster in which each node but two has its own fault, and one whose network is cut: each fault is named, and
nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import corral
from corral.findings import Finding, failures
from tests.workers.faulty_nodes import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAST_CLOCK = """
import time
_now = time.time
time.time = lambda: _now() + 90.0
"""
TINY_SHM = 'mount -t tmpfs -o size=90m none /dev/shm && head -c 60M /dev/zero > /dev/shm/full && exec "$@"'
LISTEN = (
    "import socket, sys, time; s = socket.create_server(('', int(sys.argv[1]))); print(1, flush=True); sys.stdin.read()"
)


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A folder with a short path, as Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def may(*command: str) -> bool:
    """Whether this user, on this system, may do it."""
    return bool(shutil.which(command[0])) and subprocess.run(command, capture_output=True, check=False).returncode == 0


def older_package(folder: Path) -> str:
    """An import path with an installed package of an old version."""
    info = folder / "older" / "tqdm-4.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tqdm\nVersion: 4.1.0\n")
    return str(info.parent)


def older_corral(folder: Path) -> str:
    """A Corral from before there was a doctor."""
    root = folder / "before"
    left_out = shutil.ignore_patterns("__pycache__", "doctor", "manifest.py")
    shutil.copytree(Path(corral.__file__).parent, root / "corral", ignore=left_out)
    return str(root)


def fast_clock(folder: Path) -> str:
    root = folder / "clock"
    root.mkdir()
    (root / "sitecustomize.py").write_text(FAST_CLOCK)
    return str(root)


def doctor(address: str, found: Path, *options: object, prefix: Sequence[str] = ()) -> tuple[str, int, list[Finding]]:
    """What it printed, its exit code, what failed."""
    command = [*prefix, sys.executable, "-m", "corral", "doctor", "--no-collective", "--json", found, *options]
    env = os.environ | {"RAY_ADDRESS": address}
    # In a folder without a Corral: Ray has nodes import from the folder of whoever asks first.
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=240, check=False, env=env, cwd=found.parent
    )
    assert found.exists(), done.stderr
    return done.stdout, done.returncode, failures(map(Finding.from_dict, json.loads(found.read_text())["findings"]))


@pytest.fixture(scope="module")
def found(short: Path) -> tuple[str, int, dict[tuple[str, int | None], Finding]]:
    """What is found on seven nodes: 0 and 1 are well, 2 to 6 are not."""
    paths: list[Callable[[Path], str]] = [older_package, older_corral, fast_clock]
    with ExitStack() as stack:
        address = start(stack, "node-0", 2, short)()
        # One after the other: several at once can take longer than Ray waits for a node.
        start(stack, "node-1", 2, short, address)()
        for number, path in enumerate(paths, 2):
            start(stack, f"node-{number}", 2, short, address, env={"PYTHONPATH": path(short)})()
        start(stack, "node-5", 1, short, address)()
        prefix = ["unshare", "-m", "sh", "-c", TINY_SHM, "sh"] if may("unshare", "-m", "true") else []
        start(stack, "node-6", 2, short, address, prefix=prefix)()
        said, code, bad = doctor(address, short / "found.json", "--nodes", 7, "--devices", 2)
        return said, code, {(finding.check, finding.node): finding for finding in bad}


FAULTS = {
    ("packages", 2): ("tqdm 4.1.0", "install the same versions on every node"),
    ("corral", 3): ("with digest", "install the same Corral on every node"),
    ("clock", 4): ("+90.", "set the node's clock, and let NTP keep it"),
    ("devices", 5): ("1 CPU", "start the node with 2 CPU, or ask for fewer devices"),
    ("shm", 6): (" of 90 MiB", "give the node's container more shared memory (--shm-size, or an emptyDir of Memory)"),
}


@pytest.mark.parametrize("place", FAULTS, ids=lambda place: place[0])
def test_each_fault_is_named_with_its_node(place: tuple[str, int], found) -> None:
    said, code, bad = found
    if place == ("shm", 6) and not may("unshare", "-m", "true"):
        pytest.skip("a mount namespace of its own needs root")
    assert code == 75
    text, fix = FAULTS[place]
    assert text in bad[place].found
    assert bad[place].fix == fix
    assert f"FAILED  {place[0]} on node-{place[1]}: " in said


def test_nothing_else_is_named(found) -> None:
    assert set(found[2]) <= set(FAULTS)


# The network ----------------------------------------------------------------------------------------------------------


class Net:
    """A hub with a namespace on each of two arms. The hub does not forward, so the arms reach the hub, not each
    other."""

    def __init__(self, stack: ExitStack) -> None:
        self.hub, self.one, self.two = (f"corral-{os.getpid()}-{name}" for name in ("hub", "one", "two"))
        for name in (self.hub, self.one, self.two):
            self._ip("netns", "add", name)
            stack.callback(self._ip, "netns", "del", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        self._run(self.hub, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        for number, name in enumerate((self.one, self.two), 1):
            self._ip(*f"-n {self.hub} link add v{number} type veth peer name e0 netns {name}".split())
            for space, link, last in ((self.hub, f"v{number}", 1), (name, "e0", 2)):
                self._ip("-n", space, "addr", "add", f"10.99.{number}.{last}/24", "dev", link)
                self._ip("-n", space, "link", "set", link, "up")
            self._ip("-n", name, "route", "add", "default", "via", f"10.99.{number}.1")

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", name]

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _run(self, name: str, *command: str) -> None:
        subprocess.run([*self.inside(name), *command], check=True, capture_output=True)


@pytest.fixture
def net() -> Iterator[Net]:
    if not may("ip", "netns", "add", f"corral-{os.getpid()}-try"):
        pytest.skip("network namespaces need root and iproute2")
    may("ip", "netns", "del", f"corral-{os.getpid()}-try")
    with ExitStack() as stack:
        yield Net(stack)


def test_a_pair_that_is_cut_off_and_a_port_that_is_taken(net: Net, tmp_path: Path) -> None:
    """Both nodes are well seen from the head; only what they do to each other shows it."""
    with ExitStack() as stack:
        short = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp", ignore_cleanup_errors=True))
        )
        arms = {"GLOO_SOCKET_IFNAME": "e0"}
        address = start(
            stack, "node-0", 1, short, ip="10.99.1.1", env={"GLOO_SOCKET_IFNAME": "v1"}, prefix=net.inside(net.hub)
        )()  # fmt: skip
        # One by one: Ray gives a node 30 s to come up, and two that start at once have failed by that.
        start(stack, "node-1", 1, short, address, ip="10.99.1.2", env=arms, prefix=net.inside(net.one))()
        start(stack, "node-2", 1, short, address, ip="10.99.2.2", env=arms, prefix=net.inside(net.two))()
        listener = subprocess.Popen(
            [*net.inside(net.one), sys.executable, "-c", LISTEN, "29517"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(listener.communicate)
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"1\n"
        said, code, bad = doctor(
            address, tmp_path / "found.json", "--nodes", 3, "--devices", 1, "--port", 29517,
            prefix=net.inside(net.hub),
        )  # fmt: skip
    assert code == 75
    assert {(finding.check, finding.node, finding.peer) for finding in bad} == {
        ("connect", 1, 2), ("connect", 2, 1), ("ports", 1, None)
    }  # fmt: skip
    assert "connect on node-1 to node-2: expected a connection to 10.99.2.2, found no answer in 3 s; open the " in said
    assert said.startswith("FAILED  ports on node-1: expected port 29517 free, found Address already in use; ")
