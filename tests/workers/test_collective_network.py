"""The collective check on a network whose links are made slow or cut for real: who is named, and that a busy machine
alone names nobody."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.findings import Finding, failures
from corral.workers.collective_check import read_findings
from tests.workers.check_ranks import Ranks, Spec
from tests.workers.networks import Network, unavailable

pytestmark = pytest.mark.slow
PORT = 29511  # of a network namespace, where it clashes with nothing
Check = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if why_not := unavailable():
        pytest.skip(why_not)
    with Ranks() as running:
        yield running


@pytest.fixture
def check(ranks: Ranks, tmp_path: Path) -> Check:
    """Failures that the ranks of a network find, after all of them have said the first of them."""

    def run(network: Network, devices: int = 1, step: float = 60.0) -> list[Finding]:
        world = len(network.namespaces) * devices
        spec = Spec(
            world, devices, str(tmp_path), step=step, namespaces=network.namespaces, address=network.address, port=PORT
        )
        outcomes = ranks.run(spec)
        bad = failures(read_findings(tmp_path))
        said = {outcome.error for outcome in outcomes}
        assert len(said) == 1, said
        assert bool(bad) == (said != {""})
        assert not bad or bad[0].line() in str(said.pop())
        return bad

    return run


@pytest.fixture
def busy() -> Iterator[None]:
    """Both cores, and more if there are more."""
    command = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(command) for _ in range(4)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_node_with_the_slow_link_is_named(check: Check, bad: int, devices: int):
    with Network(4) as network:
        network.slow_node(bad, "20mbit")
        (finding,) = check(network, devices)
    assert (finding.check, finding.node, finding.rank) == ("node_bandwidth", bad, None)
    assert finding.value is not None
    assert 0.5 < finding.value < 5.0  # 20 Mbit/s are 2.4 MiB/s


@pytest.mark.parametrize("pair", [(1, 3), (3, 1)])
def test_the_pair_with_the_slow_path_is_named(check: Check, pair: tuple[int, int]):
    """One direction of it is enough."""
    with Network(4) as network:
        network.slow_pair(*pair, "20mbit")
        (finding,) = check(network)
    assert (finding.check, finding.rank, finding.peer) == ("pair", 1, 3)
    assert "node-1 and node-3" in finding.line()


def test_two_nodes_with_a_link_of_no_use(check: Check):
    with Network(2) as network:
        network.slow_node(1, "10mbit")
        (finding,) = check(network, devices=4)
    assert (finding.rank, finding.peer) == (0, 4)
    assert "as on all 16 pairs" in finding.found


def test_two_nodes_that_cannot_connect_are_named(check: Check):
    with Network(4) as network:
        network.cut_pair(1, 3)
        (finding,) = check(network, step=8.0)
    assert (finding.check, finding.rank, finding.peer) == ("connect", 1, 3)


def test_a_busy_machine_is_never_red(check: Check, busy: None):
    with Network(4) as network:
        for _ in range(5):
            assert check(network, devices=2) == []
