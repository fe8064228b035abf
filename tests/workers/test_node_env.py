"""What a node derives for its ranks, from its interfaces and from the address it is known by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.errors import ConfigError
from corral.findings import Finding, failures
from corral.workers.interfaces import interfaces
from corral.workers.local_cluster import LocalCluster
from corral.workers.node_env import INTERFACES, derived, unfit, wanted_of
from corral.workers.ray_launcher import RayLauncher
from tests.workers import networks
from tests.workers.clusters import topology
from tests.workers.faulty_nodes import start

ONE = {"lo": ["127.0.0.1/8", "::1/128"], "eth0": ["10.0.0.2/24", "fe80::1/128"]}
TWO = {**ONE, "roce0": ["192.168.7.2/24"]}
BRIDGE = {**ONE, "docker0": ["172.17.0.1/16"], "cali1": ["fe80::2/128"]}


@pytest.mark.parametrize(
    ("device", "existing", "environ", "made"),
    [
        ("cpu", ONE, {}, {}),
        ("cuda", ONE, {"NCCL_SOCKET_IFNAME": "eth0"}, {}),
        ("cpu", {**ONE, "cali1": ["fe80::2/128"]}, {}, {}),
        ("cpu", BRIDGE, {}, {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}),
        (
            "cuda",
            TWO,
            {"NCCL_SOCKET_IFNAME": "roce0"},
            {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"},
        ),
        ("cpu", ONE, {"GLOO_SOCKET_IFNAME": "auto"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("npu", ONE, {}, {"HCCL_IF_IP": "10.0.0.2"}),
        ("npu", ONE, {"HCCL_IF_IP": "auto"}, {"HCCL_IF_IP": "10.0.0.2"}),
        ("npu", ONE, {"HCCL_IF_IP": "10.0.0.9"}, {}),
        (
            "npu",
            TWO,
            {"HCCL_SOCKET_IFNAME": "roce", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"},
            {"HCCL_IF_IP": "192.168.7.2"},
        ),
        ("npu", TWO, {"HCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "a", "TP_SOCKET_IFNAME": "a"}, {}),
        (
            "npu",
            TWO,
            {"HCCL_SOCKET_IFNAME": "auto"},
            {
                "HCCL_SOCKET_IFNAME": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TP_SOCKET_IFNAME": "eth0",
                "HCCL_IF_IP": "10.0.0.2",
            },
        ),
    ],
)
def test_what_is_derived(device, existing, environ, made):
    assert derived(environ, existing, "10.0.0.2", device, {}) == made


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "203.0.113.7", "node.example"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_nothing_is_derived_from_an_address_that_no_interface_to_others_has(device, address):
    assert derived({}, TWO, address, device, {}) == {}
    asked = dict.fromkeys(("GLOO_SOCKET_IFNAME", "HCCL_IF_IP"), "auto")
    made = derived(asked, TWO, address, device, {})
    assert made == {"GLOO_SOCKET_IFNAME": None} | ({"HCCL_IF_IP": None} if device == "npu" else {})


@pytest.mark.parametrize(
    ("environ", "wanted", "made", "problem"),
    [
        ({}, "roce", "roce", None),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "roce", None, None),
        ({}, "auto", "eth0", None),
        (
            {},
            "ib",
            "eth0",
            "interface: expected NCCL_SOCKET_IFNAME=ib, which the driver has, to name an interface, found eth0, roce0; "
            "set it where the node is started, or unset it for the driver",
        ),
        ({"NCCL_SOCKET_IFNAME": "auto"}, "ib", "eth0", None),
    ],
)
def test_what_the_driver_wants_is_taken_over_where_it_can_be(environ, wanted, made, problem):
    asked = wanted_of({"NCCL_SOCKET_IFNAME": wanted, "HCCL_IF_IP": "10.0.0.7", "PATH": "/"})
    assert asked == {"NCCL_SOCKET_IFNAME": wanted}
    assert derived(environ, TWO, "10.0.0.2", "cuda", asked).get("NCCL_SOCKET_IFNAME") == made
    assert [found.line() for found in unfit(environ, TWO, "cuda", asked)] == ([problem] if problem else [])


def test_a_node_with_one_interface_has_no_choice_to_get_wrong():
    asked = {"NCCL_SOCKET_IFNAME": "ib"}
    assert derived({}, ONE, "10.0.0.2", "cuda", asked) == {}
    assert unfit({}, ONE, "cuda", asked) == []


NAMES = st.sampled_from(["lo", "eth0", "roce0", "docker0", "none", "auto"])


@given(
    st.dictionaries(st.sampled_from(INTERFACES), NAMES),
    st.dictionaries(st.sampled_from(INTERFACES), NAMES),
    st.sampled_from([ONE, TWO, BRIDGE]),
    st.sampled_from(["10.0.0.2", "127.0.0.2", "192.168.7.2"]),
    st.sampled_from(["cpu", "cuda", "npu"]),
)
def test_what_is_set_wins_and_what_is_made_is_of_the_node(environ, wanted, existing, address, device):
    made = derived(environ, existing, address, device, wanted)
    assert all(environ[name] == "auto" for name in environ.keys() & made.keys())
    for name, value in made.items():
        if name == "HCCL_IF_IP":
            assert any(one.startswith(f"{value}/") for each in existing.values() for one in each)
        elif value is not None:
            assert value in existing
            assert value == wanted.get(name) or any(one.startswith(f"{address}/") for one in existing[value])


@pytest.mark.parametrize(
    ("device", "environ", "line"),
    [
        ("npu", {}, None),
        ("npu", {"HCCL_IF_IP": "10.0.0.2"}, None),
        ("npu", {"HCCL_IF_IP": "auto"}, None),
        ("cuda", {"RANK_TABLE_FILE": "/x", "HCCL_IF_IP": "1.2.3.4"}, None),
        (
            "npu",
            {"RANK_TABLE_FILE": "/user/hccl.json"},
            "rank_table: expected no RANK_TABLE_FILE, found /user/hccl.json; unset it where the node is started: HCCL "
            "would take its ranks from that file",
        ),
        (
            "npu",
            {"HCCL_IF_IP": "10.0.0.3"},
            "interface: expected HCCL_IF_IP=10.0.0.3 to be an address of the node, found 10.0.0.2, 192.168.7.2; unset "
            "it: it is derived on each node",
        ),
    ],
)
def test_what_hccl_cannot_work_with(device, environ, line):
    assert [found.line() for found in unfit(environ, TWO, device, {})] == ([] if line is None else [line])
    assert all(found.kind == "config" for found in unfit(environ, TWO, device, {}))


def test_the_interfaces_of_this_machine():
    here = interfaces()
    assert "127.0.0.1/8" in here["lo"]


WHY = networks.unavailable()
NETWORK = pytest.mark.skipif(bool(WHY), reason=WHY)
SAID = (
    "import json; from corral.workers.interfaces import interfaces; from corral.workers.node_env import derived; "
    "print(json.dumps(derived({}, interfaces(), '10.207.93.1', 'npu', {})))"
)


def with_bridge(namespace: str) -> None:
    """A second interface, with the same address on every machine, as Docker makes it."""
    networks.run("ip", "-n", namespace, "link", "add", "docker0", "type", "bridge")
    networks.run("ip", "-n", namespace, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    networks.run("ip", "-n", namespace, "link", "set", "docker0", "up")


@NETWORK
def test_a_machine_with_a_second_interface():
    with networks.Network(1) as network:
        inside = ["ip", "netns", "exec", network.namespaces[0], sys.executable, "-c", SAID]
        assert json.loads(subprocess.check_output(inside)) == {"HCCL_IF_IP": "10.207.93.1"}
        with_bridge(network.namespaces[0])
        names = dict.fromkeys(("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
        assert json.loads(subprocess.check_output(inside)) == {**names, "HCCL_IF_IP": "10.207.93.1"}


@NETWORK
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_two_nodes_meet_though_each_has_a_bridge_of_the_same_address(tmp_path: Path) -> None:
    """The host's name leads nowhere there, so that gloo would not find the others by itself."""
    with ExitStack() as stack:
        short = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp", ignore_cleanup_errors=True))
        )
        network = stack.enter_context(networks.Network(2))
        address = None
        for number, namespace in enumerate(network.namespaces):
            with_bridge(namespace)
            prefix, ip = ["ip", "netns", "exec", namespace], networks.SUBNET.format(number + 1)
            address = start(stack, f"node-{number}", 1, short, address, ip=ip, prefix=prefix)()
        command = ["ip", "netns", "exec", network.namespaces[0], sys.executable, "-m", "corral", "doctor"]
        command += ["--nodes", "2", "--devices", "1", "--json", str(tmp_path / "found.json")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": str(address)},
        )  # fmt: skip
    found = [Finding.from_dict(each) for each in json.loads((tmp_path / "found.json").read_text())["findings"]]
    assert failures(found) == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert {each.found for each in found if each.check == "derived"} == {
        "GLOO_SOCKET_IFNAME=eth0, TP_SOCKET_IFNAME=eth0"
    }
    assert any(each.check == "all_reduce" for each in found), done.stdout


@pytest.mark.slow
def test_a_rank_table_on_a_node_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/user/hccl.json")
    with LocalCluster.start(1, 1, "NPU") as cluster:
        where = topology(1, 1, cluster.address, "npu")
        with pytest.raises(ConfigError, match=r"^rank_table on node-0: expected no RANK_TABLE_FILE, found /user/hccl"):
            RayLauncher(where, "tests.workers.toy:Toy", (), tmp_path, preload=())
    assert not list(tmp_path.glob("logs/node-0/rank-*.log"))
