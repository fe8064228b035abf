"""What is made of the facts of nodes: which are at fault, and which is named."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from corral.findings import Finding, failures, worst
from corral.workers.doctor import network
from corral.workers.doctor.asked import Asked, NodeFacts, SeenNode, Space
from corral.workers.doctor.reach import Listener, reach
from corral.workers.doctor.sameness import sameness
from corral.workers.doctor.supplies import supplies
from corral.workers.doctor.table import lines
from corral.workers.interfaces import chosen

GIB = 1 << 30
ROOM = Space("/x", 100 * GIB, 50 * GIB, True)


def seen(
    number: int, *, address: str = "", skew: float = 0.0, blur: float = 0.0, devices: int | None = 4, **facts: Any
):
    """A node that is well but for what is given."""
    address = address or f"10.0.0.{number + 1}"
    usual: dict[str, Any] = {
        "host": f"host{number}", "python": "3.11.7", "packages": {"torch": "2.13.0", "corral": "1.0"},
        "corral": "c" * 64, "source": None, "unreadable": {}, "shm": ROOM, "disk": {"run folder": ROOM},
        "memory": {"total": 64 * GIB, "available": 32 * GIB}, "device_files": None, "visible": None, "ports": {},
        "own_name": [address], "interfaces": {"lo": ["127.0.0.1/8"], "eth0": [f"{address}/24"]}, "variables": {},
    }  # fmt: skip
    return SeenNode(number, f"n{number}", address, devices, NodeFacts(**(usual | facts)), skew, blur)


def asked(**given: Any) -> Asked:
    return Asked(**({"nodes": None, "devices": 4, "device": "cpu", "run_dir": "/x"} | given))


def judged(*nodes: SeenNode, **given: Any) -> list[Finding]:
    want = asked(**given)
    return failures(sameness(nodes, want) + supplies(nodes, want) + network.network(nodes, want))


def test_nodes_that_are_well():
    assert judged(seen(0), seen(1), seen(2)) == []


OLDER = {"torch": "2.12.0", "corral": "1.0"}


def test_of_three_the_odd_one_is_named_even_when_it_is_the_first():
    (finding,) = judged(seen(0, packages=OLDER), seen(1), seen(2))
    assert finding.line() == (
        "packages on node-0: expected torch 2.13.0, found torch 2.12.0; install the same versions on every node"
    )


def test_of_two_the_first_counts():
    (finding,) = judged(seen(0), seen(1, packages=OLDER))
    assert (finding.node, finding.found) == (1, "torch 2.12.0")


def test_a_package_that_one_lacks_and_many_differences():
    lacking = {"corral": "1.0"}
    (finding,) = judged(seen(0), seen(1, packages=lacking), seen(2))
    assert (finding.expected, finding.found) == ("torch 2.13.0", "torch none")
    many = {f"p{i}": "1" for i in range(9)}
    (finding,) = judged(seen(0), seen(1), seen(2, packages=OLDER | many))
    assert finding.found == "p0 1, p1 1, p2 1, 7 more"


def test_what_installs_packages_may_differ():
    assert judged(seen(0), seen(1, packages={"torch": "2.13.0", "corral": "1.0", "pip": "1"})) == []


@pytest.mark.parametrize(
    ("facts", "check", "found"),
    [
        ({"python": "3.12.1"}, "python", "3.12.1"),
        ({"corral": "d" * 64}, "corral", "1.0 with digest dddddddddddd"),
        ({"corral": None}, "corral", "none"),
        ({"corral": "! Permission denied: /x"}, "corral", "Permission denied: /x"),
        ({"shm": Space("/dev/shm", 64 << 20, 1 << 20, True)}, "shm", "1 of 64 MiB"),
        ({"shm": None}, "shm", "no /dev/shm"),
        ({"disk": {"temp": Space("/t", GIB, 5 << 20, True)}}, "disk", "5 of 1024 MiB"),
        ({"disk": {"temp": Space("/t", GIB, GIB, False)}}, "disk", "a folder that cannot be written"),
        ({"memory": {"total": GIB, "available": 300 << 20}}, "memory", "300 of 1024 MiB"),
        ({"ports": {29500: "Address already in use"}}, "ports", "Address already in use"),
        ({"own_name": "Name or service not known"}, "dns", "Name or service not known"),
        ({"own_name": ["127.0.1.1"]}, "dns", "127.0.1.1"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, "interface", "eth0, lo"),
    ],
)
def test_one_fault(facts: dict[str, Any], check: str, found: str):
    (finding,) = judged(seen(0), seen(1, **facts), ports=(29500,))
    assert (finding.check, finding.node, finding.found) == (check, 1, found)
    assert finding.fix
    assert finding.line().startswith(f"{check} on node-1: expected ")


def test_a_name_does_not_matter_where_the_interface_is_named_or_all_is_on_one_machine():
    told = {"own_name": ["127.0.1.1"], "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert judged(seen(0), seen(1, **told)) == []
    assert judged(seen(0, address="127.0.0.2"), seen(1, address="127.0.0.2", own_name="no such name")) == []
    several = [seen(number, address="10.0.0.1", own_name=["127.0.1.1"]) for number in (0, 1)]  # `ray start` by hand
    assert judged(*several) == []
    assert [each.node for each in judged(*several, seen(2))] == [0, 1]


def test_a_device_too_few_by_each_way_of_counting():
    (finding,) = judged(seen(0), seen(1, devices=3))
    assert finding.line().startswith("devices on node-1: expected 4 CPU, found 3 CPU; ")
    found = judged(seen(0, device_files=8), seen(1, device_files=3, visible="0,1,2"), device="npu")
    assert [(each.check, each.node, each.found) for each in found] == [
        ("device_files", 1, "3"),
        ("visible_devices", 1, "3 ('0,1,2')"),
    ]


def test_a_path_that_nobody_has_is_the_users_and_one_that_some_lack_the_clusters():
    absent = {"unreadable": {"/data": "No such file or directory"}}
    (nowhere,) = judged(seen(0, **absent), seen(1, **absent), paths=("/data",))
    assert (nowhere.check, nowhere.node, nowhere.kind) == ("paths", None, "config")
    (some,) = judged(seen(0), seen(1, **absent), paths=("/data",))
    assert (some.check, some.node, some.kind) == ("paths", 1, "infra")
    (script,) = judged(seen(0), seen(1, **absent), script="/data")
    assert (script.check, script.node) == ("script", 1)


def test_the_source_is_compared_with_what_was_sent():
    (finding,) = judged(seen(0, source="a" * 64), seen(1, source="b" * 64), source="/s", source_digest="b" * 64)
    assert (finding.check, finding.node, finding.found) == ("source", 0, "digest aaaaaaaaaaaa")
    (finding,) = judged(seen(0, source="a" * 64), seen(1, source="! No such file or directory: /s"), source="/s")
    assert (finding.node, finding.found) == (1, "No such file or directory: /s")


@pytest.mark.parametrize(
    ("skews", "bad"),
    [((0.0, 60.0), [1]), ((60.0, 0.0), [0]), ((-7.0, 0.1, 0.2), [0]), ((4.9, 0.0), []), ((60.0, 60.1, 60.2), [])],
)
def test_clocks_are_compared_with_the_middle_one(skews: tuple[float, ...], bad: list[int]):
    found = failures(network.clocks([seen(i, skew=skew) for i, skew in enumerate(skews)], 5.0))
    assert [finding.node for finding in found] == bad


def test_a_clock_that_could_only_be_read_slowly_gets_the_benefit_of_the_doubt():
    assert failures(network.clocks([seen(0), seen(1, skew=6.0, blur=2.0)], 5.0)) == []


@pytest.mark.parametrize(
    ("backend", "value", "expected"),
    [
        ("GLOO", "eth0", ["eth0"]),
        ("GLOO", "eth", []),
        ("NCCL", "eth", ["eth0", "eth1"]),
        ("NCCL", "=eth", []),
        ("NCCL", "=eth1,lo", ["lo", "eth1"]),
        ("HCCL", "^lo,docker", ["eth0", "eth1"]),
        ("NCCL", "ib", []),
    ],
)
def test_which_interfaces_a_variable_names(backend: str, value: str, expected: list[str]):
    assert chosen(backend, value, ["lo", "eth0", "eth1"]) == expected


def test_a_variable_of_a_backend_that_is_not_used_does_not_matter():
    wrong = {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}
    assert judged(seen(0), seen(1, **wrong)) == []
    (finding,) = judged(seen(0, device_files=4), seen(1, device_files=4, **wrong), device="cuda")
    assert (finding.check, finding.node, finding.kind) == ("interface", 1, "config")


def test_a_blocked_pair_is_named():
    nodes = [seen(0), seen(1), seen(2)]
    found = network.connections(nodes, {(1, 2): "no answer in 3 s", (2, 1): "no answer in 3 s"})
    assert [finding.line().split(";")[0] for finding in failures(found)] == [
        "connect on node-1 to node-2: expected a connection to 10.0.0.3, found no answer in 3 s",
        "connect on node-2 to node-1: expected a connection to 10.0.0.2, found no answer in 3 s",
    ]
    assert [finding.node for finding in found if finding.ok] == [0]


def test_the_node_with_most_failures_comes_first_and_what_cannot_be_before_all():
    def bad(node: int | None, peer: int | None = None, kind: str = "infra") -> Finding:
        return Finding("c", False, "x", "y", node=node, peer=peer, kind=kind)

    assert worst([]) is None
    assert worst([Finding("c", True, "x", "x")]) is None
    assert worst([bad(0, 2), bad(1, 2), bad(2, 0), bad(2, 1)]) == bad(2, 0)
    assert worst([bad(0), bad(1), bad(1)]) == bad(1)
    assert worst([bad(1), bad(1), bad(None, kind="config")]) == bad(None, kind="config")
    said = lines([seen(0), seen(1)], [Finding("a", True, "x", "x", node=0), bad(1)], 1.0)
    assert said[0] == "FAILED  c on node-1: expected x, found y"
    assert said[-1] == "2 checks on 2 nodes in 1.0 s: 1 failed"


# Reaching each other --------------------------------------------------------------------------------------------------


def test_data_comes_back_from_a_listener():
    listener = Listener("127.0.0.1")
    try:
        assert reach(listener.address, listener.port, 20.0) == ""
        assert reach(listener.address, listener.port, 20.0) == ""
    finally:
        listener.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert reach("127.0.0.1", port, 20.0) == "Connection refused"


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "no answer in 0.2 s"), (b"", "0 of 262144 bytes, or others, came back"), (b"x" * 262144, "262144 of")],
)
def test_a_path_that_swallows_or_changes_data(answer: bytes | None, said: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                left = 262144
                while answer is not None and left > 0:
                    left -= len(connection.recv(left))
                if answer is None:
                    done.wait(20.0)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found = reach("127.0.0.1", server.getsockname()[1], 0.2 if answer is None else 20.0)
        done.set()
        thread.join()
    assert found.startswith(said)
