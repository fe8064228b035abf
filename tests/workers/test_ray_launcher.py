"""Ranks on Ray nodes: their environment, and every way in which they, their node or their driver can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from corral.errors import ConfigError, CorralError, DataError, InfraError
from corral.workers.launcher import WorkerError
from corral.workers.local_cluster import LocalCluster
from corral.workers.ray_launcher import RayLauncher
from tests.workers.clusters import all_gone, processes, running, topology, until

WORKER = "tests.workers.toy:Toy"
DRIVER = """
from tests.workers.clusters import topology
from corral.workers.ray_launcher import RayLauncher
where = topology(1, 2, {address!r})
launcher = RayLauncher(where, "tests.workers.toy:Toy", ("",), {run_dir!r}, preload=(), wait={wait})
try:
    launcher.call("hang", [(), ()])
finally:
    launcher.close()
"""
Start = Callable[..., RayLauncher]


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path) -> Iterator[Start]:
    """Start ranks on the shared cluster, writing into tmp_path; they are ended after the test."""
    launchers = []

    def begin(nnodes: int = 1, devices: int = 2, worker: str = WORKER, wait: float = 60.0) -> RayLauncher:
        where = topology(nnodes, devices, cluster.address)
        launchers.append(RayLauncher(where, worker, (str(tmp_path),), tmp_path, preload=("fractions",), wait=wait))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.close()


def when(fact: Callable[[], bool], then: Callable[[], object]) -> None:
    """Do something from another thread once a fact holds."""

    def watch() -> None:
        until(fact)
        then()

    threading.Thread(target=watch, daemon=True).start()


def test_every_rank_is_its_own_process_with_torchrun_variables(start: Start) -> None:
    launcher = start(nnodes=2)
    found = launcher.call("where", [()] * 4)
    assert len({pid for _, pid, _ in found}) == 4
    assert {rank: pid for rank, (_, pid, _) in enumerate(found)} == launcher.pids()
    for rank, (_, _, env) in enumerate(found):
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "4", str(rank % 2))
        assert env["OMP_NUM_THREADS"] == "1"
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for _, _, env in found}) == 1


def test_ranks_work_in_the_folder_of_the_driver(start: Start) -> None:
    assert start().call("working_folder", [(), ()]) == [os.getcwd()] * 2


def test_close_reaches_every_worker(start: Start, tmp_path: Path) -> None:
    launcher = start()
    launcher.call("echo", [(0,), (0,)])
    launcher.close()
    assert [(tmp_path / f"closed-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    launcher.close()


def test_the_driver_keeps_its_signal_handlers(start: Start) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    start(devices=1)
    assert [signal.getsignal(number) for number in numbers] == before


def test_modules_are_imported_before_the_fork_and_ranks_know_nothing_of_ray(start: Start) -> None:
    modules = start().call("modules", [(), ()])
    assert all("fractions" in names for names in modules)
    assert not any(name.split(".")[0] == "ray" for names in modules for name in names)


def test_ranks_follow_the_names_of_the_nodes(start: Start) -> None:
    """node-0 of the run is node-0 of the cluster: its ranks live below that raylet."""
    launcher = start(nnodes=2)
    names = [_node_name(pid) for pid in launcher.pids().values()]
    assert names == ["node-0", "node-0", "node-1", "node-1"]


def _node_name(pid: int) -> str:
    raylet = next(parent for parent in psutil.Process(pid).parents() if parent.name() == "raylet")
    return next(part.split("=")[1] for part in raylet.cmdline() if part.startswith("--node-name="))


def test_an_unforeseen_error_names_node_rank_and_last_line(start: Start, tmp_path: Path) -> None:
    launcher = start(nnodes=2)
    with pytest.raises(WorkerError, match=r"fail_if failed on node-1 rank 2: ValueError: broken on 2") as caught:
        launcher.call("fail_if", [(rank == 2,) for rank in range(4)])
    assert caught.value.exit_code == 1
    assert "in fail_if" in caught.value.details
    assert "ValueError: broken on 2" in (tmp_path / "logs/node-1/rank-2.log").read_text()
    with pytest.raises(InfraError, match="after an earlier failure: fail_if failed on node-1 rank 2"):
        launcher.call("echo", [(0,)] * 4)


def test_of_several_failures_the_first_by_time_is_reported(start: Start) -> None:
    launcher = start(nnodes=2)
    with pytest.raises(WorkerError, match="node-1 rank 3: ValueError: broken on 3"):
        launcher.call("fail_if", [(True, 0.2), (True, 0.25), (True, 0.3), (True, 0.0)])


def test_a_foreseen_error_names_its_rank(start: Start) -> None:
    with pytest.raises(DataError, match=r"no such row \(node-0 rank [01]\)"):
        start().call("fail", [("DataError", "no such row")] * 2)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("exit", InfraError, r"worker node-1 rank 3 \(pid \d+\) died: exit code 3; .*rank-3.log: .*about to go"),
        ("segfault", InfraError, r"worker node-1 rank 3 \(pid \d+\) died: signal 11 \(SIGSEGV\).*hang_unless"),
        ("unpicklable", WorkerError, r"hang_unless failed on node-1 rank 3: TypeError: cannot pickle"),
        ("raise", WorkerError, r"hang_unless failed on node-1 rank 3: line after another"),
    ],
)
def test_one_rank_leaves_while_the_others_hang(start: Start, how: str, error: type[CorralError], says: str) -> None:
    launcher = start(nnodes=2)
    ranks = processes(launcher.pids().values())
    with pytest.raises(error, match=says):
        launcher.call("hang_unless", [(3, how)] * 4)
    launcher.close()
    assert all_gone(ranks)


def test_kill_during_a_call(start: Start, tmp_path: Path) -> None:
    launcher = start(nnodes=2)
    victim = launcher.pids()[2]
    when(lambda: "about to go" in (tmp_path / "logs/node-1/rank-2.log").read_text(), lambda: os.kill(victim, 9))
    with pytest.raises(InfraError, match=rf"worker node-1 rank 2 \(pid {victim}\) died: signal 9 .*about to go"):
        launcher.call("hang_unless", [(2, "hang")] * 4)


def test_kill_between_calls(start: Start) -> None:
    launcher = start()
    launcher.call("write", [("last words",)] * 2)
    victim = psutil.Process(launcher.pids()[1])
    victim.kill()
    assert all_gone([victim])
    with pytest.raises(InfraError, match=rf"node-0 rank 1 \(pid {victim.pid}\) died: signal 9 .*last words stderr"):
        launcher.call("hang_unless", [(1, "hang")] * 2)


def test_a_worker_that_cannot_be_made(start: Start) -> None:
    with pytest.raises(WorkerError, match=r"start failed on node-0 rank [01]: AttributeError: .*Missing"):
        start(worker="tests.workers.toy:Missing")
    with pytest.raises(WorkerError, match=r"start failed on node-0 rank [01]: ModuleNotFoundError"):
        start(worker="tests.workers.nowhere:Toy")


def test_a_module_that_cannot_be_imported_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"could not start; last lines of logs/node-0/node.log: .*no_such_module"):
        RayLauncher(topology(1, 2, cluster.address), WORKER, ("",), tmp_path, preload=("no_such_module",))


def test_more_nodes_than_the_cluster_has(start: Start) -> None:
    says = r"found 2 nodes with 2 CPU after 1 s; need 3 x 2 CPU.*ray start --address"
    with pytest.raises(InfraError, match=says) as caught:
        start(nnodes=3, wait=1.0)
    assert caught.value.exit_code == 75


def test_devices_in_use_by_another_run(start: Start, cluster: LocalCluster, tmp_path: Path) -> None:
    """The second driver is a process of its own, as a process has one connection to Ray."""
    start(nnodes=2)
    code = DRIVER.format(address=cluster.address, run_dir=str(tmp_path / "second"), wait=1.0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "InfraError: found 2 nodes with 2 CPU, but only 0 CPU in all are free after 1 s" in done.stderr


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"no Ray cluster at 127\.0\.0\.2:1 after 1 s"):
        RayLauncher(topology(1, 1, "127.0.0.2:1"), WORKER, ("",), tmp_path, preload=(), wait=1.0)


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head", ":6379", "localhost:", "localhost:0", "localhost:99999", "localhost:６３"]
)
def test_an_address_of_another_form_is_the_users_mistake(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS={address}: expected HOST:PORT of the head node"):
        RayLauncher(topology(1, 1, address), WORKER, ("",), tmp_path, preload=(), wait=1.0)


def test_a_run_folder_that_cannot_be_written(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfraError, match=r"node-0 .* was lost during rendezvous: .*NotADirectoryError"):
        RayLauncher(topology(1, 1, cluster.address), WORKER, ("",), tmp_path / "file", preload=())


def test_ctrl_c_during_a_call_ends_all_ranks(start: Start, tmp_path: Path) -> None:
    launcher = start(nnodes=2)
    ranks = processes(launcher.pids().values())
    when(
        lambda: all(running(tmp_path, rank, "hang") for rank in range(4)),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    with pytest.raises(KeyboardInterrupt):
        launcher.call("hang", [()] * 4)
    assert all_gone(ranks)


def test_a_killed_driver_takes_its_ranks_along_and_leaves_the_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    with _driver(tmp_path, cluster.address) as driver:
        until(lambda: running(tmp_path, 1, "hang"))
        ranks = _ranks_of(tmp_path, 2)
        driver.kill()
    assert all_gone(ranks)
    assert psutil.pid_exists(cluster.supervisor_pid)


def test_a_killed_driver_takes_its_own_local_nodes_along(tmp_path: Path) -> None:
    with _driver(tmp_path, None) as driver:
        until(lambda: running(tmp_path, 1, "hang"))
        everything = psutil.Process(driver.pid).children(recursive=True)
        ranks = _ranks_of(tmp_path, 2)
        assert {rank.pid for rank in ranks} < {process.pid for process in everything}
        folder = next(part for process in everything for part in process.cmdline() if part.startswith("--temp_dir="))
        driver.kill()
    assert all_gone(everything)
    assert not Path(folder.split("=")[1]).exists()


def _driver(run_dir: Path, address: str | None) -> subprocess.Popen[bytes]:
    code = DRIVER.format(address=address, run_dir=str(run_dir), wait=60.0)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def _ranks_of(run_dir: Path, count: int) -> list[psutil.Process]:
    files = [run_dir / "progress" / f"rank-{rank}.json" for rank in range(count)]
    until(lambda: all(path.exists() for path in files))
    return processes(json.loads(path.read_text())["pid"] for path in files)


def test_each_rank_sees_one_accelerator(tmp_path: Path) -> None:
    """NPUs that are only a number Ray counts, which is all the launcher knows of them. Nothing is imported before the
    ranks are forked, and each has the variables of its device type."""
    with LocalCluster.start(nodes=1, devices_per_node=2, resource="NPU") as own:
        where = topology(1, 2, own.address, "npu")
        launcher = RayLauncher(where, WORKER, (str(tmp_path),), tmp_path, preload=("this",))
        try:
            found = launcher.call("where", [(), ()])
            assert all("this" not in modules for modules in launcher.call("modules", [(), ()]))
        finally:
            launcher.close()
    assert [env["ASCEND_RT_VISIBLE_DEVICES"] for _, _, env in found] == ["0", "1"]
    assert {env["PYTORCH_NPU_ALLOC_CONF"] for _, _, env in found} == {"expandable_segments:True"}


def test_a_lost_head_ends_the_driver_as_an_infrastructure_failure(tmp_path: Path) -> None:
    with _driver(tmp_path, None) as driver:
        until(lambda: running(tmp_path, 1, "hang"))
        everything = psutil.Process(driver.pid).children(recursive=True)
        for process in everything:
            if process.name() in ("gcs_server", "raylet"):
                process.kill()
        assert driver.wait(50) == InfraError.exit_code
    assert all_gone(everything)


def test_a_lost_node_is_named(tmp_path: Path) -> None:
    """On a cluster of its own, as it does not come back."""
    with LocalCluster.start(nodes=2, devices_per_node=1) as own:
        launcher = RayLauncher(topology(2, 1, own.address), WORKER, (str(tmp_path),), tmp_path, preload=())
        try:
            ranks = processes(launcher.pids().values())
            raylet = next(parent for parent in ranks[1].parents() if parent.name() == "raylet")
            when(lambda: running(tmp_path, 1, "hang_unless"), raylet.kill)
            with pytest.raises(InfraError, match=r"node-1 \(node-1, .*\) was lost during hang_unless: "):
                launcher.call("hang_unless", [(1, "hang")] * 2)
        finally:
            launcher.close()
        assert all_gone(ranks)
