"""`corral cluster local`: exit codes, signals, and that nothing is left behind however it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from corral.errors import DeadlineError, InfraError
from corral.workers.local_cluster import LocalCluster
from tests.workers.clusters import all_gone, until

LOCAL = [sys.executable, "-m", "corral", "cluster", "local"]
SLEEPER = [sys.executable, "-c", "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"]


def local(*arguments: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LOCAL, *arguments, "--", *command], capture_output=True, text=True, timeout=120, check=False
    )


def left_behind(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], Path]:
    """Everything below the process, and the cluster's folder."""
    below = psutil.Process(process.pid).children(recursive=True)
    supervisor = next(each for each in below if "corral.workers.supervisor" in each.cmdline())
    folder = re.search(r'"temp_dir": "([^"]+)"', " ".join(supervisor.cmdline()))
    assert folder is not None
    return below, Path(folder[1])


def test_the_command_sees_the_nodes_and_its_exit_code_is_returned() -> None:
    code = (
        "import os, ray, sys\n"
        "ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR')\n"
        "print(sorted((node['NodeName'], node['Resources']['CPU']) for node in ray.nodes()))\n"
        "sys.exit(7)\n"
    )
    done = local("--nodes", "2", "--devices", "3", command=[sys.executable, "-c", code])
    assert done.stdout == "[('node-0', 3.0), ('node-1', 3.0)]\n"
    assert done.returncode == 7


def test_a_separate_head_is_one_more_node_without_devices() -> None:
    code = (
        "import os, ray\n"
        "from corral.workers.placement import reserve\n"
        "ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR')\n"
        "print(sorted((node['NodeName'], node['Resources'].get('CPU', 0)) for node in ray.nodes()))\n"
        "print([(node.name, node.bundle) for node in reserve(1, 2, 'cpu', 30.0)[1]])\n"
    )
    done = local("--nodes", "1", "--devices", "2", "--head", "separate", command=[sys.executable, "-c", code])
    assert done.stdout.splitlines() == ["[('head', 0), ('node-0', 2.0)]", "[('node-0', 0)]"], done.stderr


def test_a_command_that_cannot_run() -> None:
    done = local(command=["/no/such/command"])
    assert done.returncode == 127
    assert "cannot run '/no/such/command': No such file or directory" in done.stderr


def test_no_command_is_a_configuration_error() -> None:
    done = subprocess.run([*LOCAL, "--nodes", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "no command to run" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_while_the_command_runs(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """SIGINT and SIGTERM are the command's to answer; after SIGKILL nobody is left to answer, and still all ends."""
    ready = tmp_path / "ready"
    with subprocess.Popen([*LOCAL, "--", *SLEEPER, str(ready)], stderr=subprocess.DEVNULL, text=True) as process:
        until(ready.exists)
        below, folder = left_behind(process)
        assert any("raylet" in each.name() for each in below)
        assert folder.exists()
        process.send_signal(number)
        assert process.wait(60) == code
    assert all_gone(below)
    until(lambda: not folder.exists())


def test_the_command_may_answer_a_signal_as_it_likes(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'echo saved; exit 9' INT; touch {ready}; while true; do sleep 0.1; done"
    with subprocess.Popen([*LOCAL, "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        until(ready.exists)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == 9


def test_a_daemon_of_the_command_does_not_outlive_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; exec sleep 600' & "
    script += f"while [ ! -e {pid_file} ]; do sleep 0.05; done"
    assert local(command=["sh", "-c", script]).returncode == 0
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_ctrl_c_while_the_nodes_start(tmp_path: Path) -> None:
    with subprocess.Popen([*LOCAL, "--nodes", "2", "--", "true"], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: "gcs_server" in {each.name() for each in psutil.Process(process.pid).children(recursive=True)})
        below, folder = left_behind(process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130
    assert all_gone(below)
    assert not folder.exists()


def test_clusters_side_by_side_do_not_meet() -> None:
    with LocalCluster.start(1, 1) as one, LocalCluster.start(1, 2) as other:
        assert one.address != other.address
        assert one.temp_dir != other.temp_dir
        mine = psutil.Process(other.supervisor_pid).children(recursive=True)
        one.close()
        assert all(each.is_running() for each in mine if each.name() in ("gcs_server", "raylet"))
    assert all_gone(mine)


def test_a_taken_port_is_named_and_a_free_one_is_used() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InfraError, match=rf"port taken: {port} .*--port"):
            LocalCluster.start(1, 1, port=port)
    with LocalCluster.start(1, 1, port=port) as cluster:
        assert cluster.address.endswith(f":{port}")


def test_a_start_beyond_its_deadline() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(DeadlineError, match=r"1 x 1 CPU.*did not start within 0.01 s"):
        LocalCluster.start(1, 1, timeout=0.01)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_start_that_fails_quotes_the_log() -> None:
    with pytest.raises(InfraError, match=r"1 x 1 memory.*starter\.log: .*memory"):
        LocalCluster.start(1, 1, resource="memory")  # a name Ray keeps for itself


def test_other_resources_count_as_devices() -> None:
    code = (
        "import os, ray\n"
        "ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR')\n"
        "print(ray.cluster_resources()['NPU'])\n"
    )
    done = local("--devices", "4", "--resource", "NPU", command=[sys.executable, "-c", code])
    assert done.stdout == "4.0\n"


def test_without_nodes_only_the_end_of_the_command_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the command left in a session of its own goes with it, and so does the named folder."""
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent) / "named"
        script = f"ls -d {folder}; setsid sleep 600 & echo $! ${{RAY_ADDRESS-unset}}; exit 6"
        done = local("--nodes", "0", "--temp-dir", str(folder), command=["bash", "-c", script])
        assert (done.returncode, folder.exists()) == (6, False)
        named, pid, address = done.stdout.split()
        assert (named, address) == (str(folder), "unset")
        assert not psutil.pid_exists(int(pid))
        folder.mkdir()
        taken = local("--nodes", "0", "--temp-dir", str(folder), command=["true"])
        assert (taken.returncode, taken.stderr) == (
            75,
            f"error: local Ray nodes: cannot make {folder}: File exists; name a new folder\n",
        )
