"""What went wrong with Ray's nodes in the wild, done to the nodes that jobs of the local backend have: the numbers are
those of the project's list of incidents. A whole service and its client run each job."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from corral.errors import InfraError
from corral.job.backends.base import ANY
from corral.job.backends.ray_jobs.api import RayNode
from corral.job.backends.ray_jobs.attempt import gate
from corral.job.protocol.submit import Resources
from corral.platform import instead
from corral.workers.local_cluster import LONGEST_TEMP, LocalCluster
from tests.job.backends.ray_jobs.head import ray_head
from tests.job.e2e.faults import Client, Place, place, until

# Ranks as a run has them: LAUNCH NODES DEVICES KIND; what they print goes to their own files.
LAUNCH = """
import os, sys
from pathlib import Path
from corral.config.plan import Topology
from corral.errors import CorralError
from corral.workers.ray_launcher import RayLauncher

nodes, devices, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("driver", os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset"), flush=True)
run = Path(os.environ["CORRAL_RUN_DIR"])
where = Topology(kind, nodes, devices, "ray", os.environ["RAY_ADDRESS"])
try:
    ranks = RayLauncher(where, "talker:Talker", (), run, preload=(), wait=5.0)
    seen = ranks.call("talk", [()] * (nodes * devices))
    ranks.close()
except CorralError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print("ranks", *seen, flush=True)
"""
TALKER = """
import os

class Talker:
    def __init__(self, rank):
        self.rank = rank.rank

    def talk(self):
        for number in range(500):
            print(f"rank {self.rank} says {number}", flush=True)
        return os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset")

    def close(self):
        pass
"""
RANKS = 'PYTHONPATH="$PWD:$PYTHONPATH" exec python launch.py "$@"\n'
MEETING = """
touch "$GATES/$1.there"
while [ ! -e "$GATES/$2.there" ]; do sleep 0.05; done
echo "$1 at $RAY_ADDRESS"
python -c "import ray; ray.init(log_to_driver=False, logging_level='ERROR'); print(len(ray.nodes()))"
"""
# Orphans that end while the job goes on, one that does not end, and a task of Ray's.
ORPHANS = """
for i in 1 2 3 4 5 6; do ( sh -c 'echo $$ >> "$GATES/pids"; sleep 0.1' & ); done
( setsid sh -c 'echo $$ >> "$GATES/last"; exec sleep 600' & )
python -c "
import ray
ray.init(log_to_driver=False, logging_level='ERROR')
print(ray.get(ray.remote(lambda: 'worked').remote()))"
touch "$GATES/orphans"
while [ ! -e "$GATES/orphans.open" ]; do sleep 0.05; done
exit 7
"""


def write(it: Place) -> Place:
    for name, text in {"launch.py": LAUNCH, "talker.py": TALKER, "ranks.sh": RANKS}.items():
        it.script(name, text)
    it.script("meeting.sh", MEETING)
    it.script("orphans.sh", ORPHANS)
    it.script("port.sh", 'corral cluster local --port "$1" -- true\n')
    it.script("doctor.sh", "corral doctor --kind npu --nodes 1 --devices 2 --wait 1\n")
    return it


@pytest.fixture(scope="module")
def at() -> Iterator[Place]:
    with place("--devices", 8) as it:
        yield write(it)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A service whose machine says which accelerators are its own, and has a temporary folder with a long path."""
    with tempfile.TemporaryDirectory(prefix="corral-test-", dir="/tmp") as folder:
        long = Path(folder, "x" * 100)
        long.mkdir()
        monkeypatch.setenv("TMPDIR", str(long))
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,4")
        with place("--devices", 8) as it:
            yield write(it)
            assert not list(long.glob("corral-*"))


def local(it: Place, nodes: int, devices: int, kind: str, script: str, *arguments: object) -> Client:
    asked = ("--nodes", nodes, "--devices", devices, "--kind", kind)
    return it.submit(*asked, script=script, arguments=arguments)


def final(it: Place, client: Client) -> tuple[str, str | None]:
    event = it.service.events(client.job_id)[-1]
    return event["status"], event.get("class")


@pytest.mark.slow
def test_12_ranks_of_three_local_nodes_have_output_of_their_own(at: Place) -> None:
    """Ray's agents of several nodes on a host write into one file; what ranks say goes through no file of Ray's."""
    client = local(at, 3, 2, "cpu", "ranks.sh", 3, 2, "cpu")
    assert client.done(120) == 0, client.err
    assert final(at, client) == ("SUCCEEDED", None)
    events = [event for event in at.service.events(client.job_id) if event["type"] == "log"]
    for rank in range(6):
        said = [(event["node"], event["line"]) for event in events if event.get("rank") == rank]
        assert said == [(rank // 2, f"rank {rank} says {number}") for number in range(500)]
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_14_jobs_that_start_at_the_same_moment_do_not_take_each_other_s_ports(at: Place) -> None:
    names = ["a", "b", "c"]
    clients = [local(at, 2, 1, "cpu", "meeting.sh", *pair) for pair in zip(names, names[1:] + names[:1], strict=True)]
    for client in clients:
        assert client.done(180) == 0, client.err
        assert final(at, client) == ("SUCCEEDED", None)
        assert client.lines[1] == "2"  # its own nodes, and no others
    assert len({client.lines[0].split(" at ")[1] for client in clients}) == 3


@pytest.mark.slow
def test_14_a_port_of_the_head_that_is_taken_is_one_line(at: Place) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        client = local(at, 1, 1, "cpu", "port.sh", port)
        assert client.done() == 75
    line = f"local Ray nodes: port taken: {port} (Address already in use); choose another with --port, or leave it out"
    assert client.lines == [f"error: {line}"]
    assert client.verdict.startswith(f"FAILED (infra): error: {line}"), client.verdict
    assert final(at, client) == ("FAILED", "infra")


def test_15_a_temporary_folder_whose_path_is_too_long_is_one_line(tmp_path: Path) -> None:
    named = tmp_path / ("x" * LONGEST_TEMP)
    with pytest.raises(InfraError) as caught:
        LocalCluster.start(1, 1, temp_dir=named)
    assert str(caught.value) == f"local Ray nodes: {named} is over 40 bytes long; name a shorter folder"
    assert not named.exists()


@pytest.mark.slow
def test_15_25_a_long_tmpdir_and_accelerators_that_the_node_names(wide: Place) -> None:
    """Sockets lie in a folder with a short path all the same. Ranks have the devices named where the node started."""
    client = local(wide, 1, 2, "npu", "ranks.sh", 1, 2, "npu")
    assert client.done(120) == 0, client.err
    assert [line for line in client.lines if "says" not in line] == ["driver 6,4", "ranks 6 4"]
    assert final(wide, client) == ("SUCCEEDED", None)
    wide.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_23_orphans_of_a_command_leave_no_zombies(at: Place) -> None:
    client = local(at, 2, 1, "cpu", "orphans.sh")
    at.reached("orphans", 120)
    pids = [int(word) for word in (at.gates / "pids").read_text().split()]
    assert len(pids) == 6
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "orphans that ended are waited for")
    until(lambda: not zombies(at), "no zombie is left while the job runs")
    last = int((at.gates / "last").read_text())
    assert psutil.Process(last).is_running()
    at.open("orphans.open")
    assert client.done() == 7, client.err
    assert "worked" in client.lines
    assert final(at, client) == ("FAILED", "user")
    at.service.nothing_left(client.job_id)
    until(lambda: not zombies(at), "no zombie is left after it")
    assert not psutil.pid_exists(last)


def zombies(it: Place) -> list[psutil.Process]:
    """Below the service, whose children all hosts of jobs are."""
    found = []
    for process in psutil.Process(it.service.process.pid).children(recursive=True):
        try:
            found += [process] if process.status() == psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_25_each_rank_has_its_npu_and_the_driver_is_left_alone(at: Place) -> None:
    """A job may name devices for its driver; nodes and ranks are not the driver's to decide."""
    client = local(at, 1, 2, "npu", "ranks.sh", 1, 2, "npu")
    assert client.done(120) == 0, client.err
    assert [line for line in client.lines if "says" not in line] == ["driver unset", "ranks 0 1"]
    named = at.submit(
        "--nodes", 1, "--devices", 2, "--kind", "npu", "--env", "ASCEND_RT_VISIBLE_DEVICES=5", script="ranks.sh",
        arguments=(1, 2, "npu"),
    )  # fmt: skip
    assert named.done(120) == 0, named.err
    assert [line for line in named.lines if "says" not in line] == ["driver 5", "ranks 0 1"]


@pytest.mark.slow
@pytest.mark.parametrize("named", [None, "6,4"])
def test_25_a_submitted_driver_sees_the_npus_of_its_node(named: str | None) -> None:
    """Ray starts what it was sent in a process that holds no NPU, and older ones emptied the variable there."""
    env = {} if named is None else {"ASCEND_RT_VISIBLE_DEVICES": named}
    with (
        ray_head(4, env, "--resources", '{"NPU": 2}') as head,
        tempfile.TemporaryDirectory(dir="/tmp") as nodes,
        place("--backend", "ray", "--address", head.address, "--agent-dir", nodes, "--default-kind", "npu") as it,
    ):
        write(it)
        client = it.submit("--nodes", 1, "--devices", 2, script="ranks.sh", arguments=(1, 2, "npu"))
        assert client.done(90) == 0, client.err
        ranks = (named or "0,1").replace(",", " ")
        assert [line for line in client.lines if "says" not in line] == [f"driver {named or 'unset'}", f"ranks {ranks}"]
        assert final(it, client) == ("SUCCEEDED", None)


def test_26_nodes_that_were_started_with_gpus_are_told_apart_from_empty_ones() -> None:
    """The gate in front of a Ray job; its line is what the start deadline quotes, with the class infra."""
    two = Resources(nodes=2, accelerators_per_node=4, kind="npu")
    wrong = [RayNode(f"id-{name}", name, True, {"CPU": 8, "GPU": 4}, "10.0.0.1", name == "h") for name in ("h", "w")]
    assert gate(wrong, two, ANY, "NPU") == "0 of 2 nodes with 4 NPU; h has 0 and 4 GPU; w has 0 and 4 GPU"
    assert instead({"CPU": 4, "NPU": 2, "GPU": 1}, "NPU") == ""
    assert instead({"CPU": 4, "NPU": 2}, "GPU") == " and 2 NPU"
    assert instead({"NPU": 2}, "CPU") == ""


@pytest.mark.slow
def test_26_a_node_that_was_started_with_gpus_in_place_of_npus(at: Place) -> None:
    client = local(at, 1, 2, "gpu", "ranks.sh", 1, 2, "npu")
    assert client.done(120) == 75, client.err
    said = "error: found 1 node with 0 NPU and 2 GPU after 5 s; need 1 x 2 NPU "
    assert client.verdict.startswith(f"FAILED (infra): {said}"), client.verdict
    assert final(at, client) == ("FAILED", "infra")


@pytest.mark.slow
def test_26_the_doctor_names_the_gpus_of_a_node_that_is_to_have_npus(at: Place) -> None:
    client = local(at, 1, 2, "gpu", "doctor.sh")
    assert client.done(120) == 75, client.err
    assert "devices on node-0: expected 2 NPU, found 0 NPU and 2 GPU; start the node with 2 NPU" in client.out
    assert final(at, client) == ("FAILED", "infra")
