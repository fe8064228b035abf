"""The agent as a process: what it runs, what it records, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.job.agent.conftest import MakeSpec, Start, end_of
from tests.job.agent.service import RecordingService

SECRET = "hunter2-hunter2"


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_a_job_from_start_to_end(make: MakeSpec, start: Start, service: RecordingService):
    script = """
        echo first; echo "to stderr" >&2; echo "by name" > /dev/stderr
        run=$CORRAL_RUN_DIR; rank=$run/logs/node-1/rank-5.log; mkdir -p $run/logs/node-1 $run/progress
        echo "rank speaks" > $rank
        echo '{"rank": 5, "node": 1, "calls": 3, "state": "idle", "time": 1.5, "pid": 1}' > $run/progress/rank-5.json
        echo '{"rank": 6, "no' > $run/progress/rank-6.json
        echo "$CORRAL_JOB_ID $CORRAL_JOB_ATTEMPT $CORRAL_JOB_NODES $CORRAL_JOB_DEVICES $CORRAL_RANK_OUTPUT $MINE"
        echo "$PASSWORD" | base64; echo "it is $PASSWORD"; echo "rank: $PASSWORD" >> $rank
        read line && echo never
        printf "no newline"; exit 3"""
    folder = make("bash", "-c", script, env={"MINE": "x y"}, secrets={"PASSWORD": SECRET})
    assert start(folder).wait(20) == 3
    assert service.heartbeats[-1]["progress"] == 3
    *lines, encoded, told, last = service.lines("driver")
    assert lines == ["first", "to stderr", "by name", "rj-0123456789ab 1 2 4 files x y"]
    assert encoded.startswith("***")
    assert (told, last) == ("it is ***", "no newline")
    assert service.lines("node-1/rank-5") == ["rank speaks", "rank: ***"]
    assert service.phases() == ["preflight", "running", "collecting"]
    record = end_of(folder)
    assert record.exit_code == 3
    assert record.failure is None
    assert record.sources == service.watermarks
    assert [json.loads(record.model_dump_json())] == service.ends
    assert service.heartbeats[-1]["output_bytes"] == sum(record.sources.values())
    everything = [path for path in folder.rglob("*") if path.is_file() and path.parent == folder]
    assert all(path.stat().st_mode & 0o077 == 0 for path in everything if path.name != "spec.json")
    said = (folder / "agent.log").read_text()
    assert SECRET not in said
    assert service.token not in said


@pytest.mark.parametrize(
    ("command", "given", "code", "failure"),
    [
        (["no-such-command-anywhere"], {}, 127, "command no-such-command-anywhere is not there"),
        (["/dev/null"], {}, 126, "command /dev/null cannot be executed"),
        (["true"], {"cwd": "nowhere"}, 127, "nowhere is not there"),
        (["bash", "/x/y.sh"], {"script": "/x/y.sh"}, 78, "script /x/y.sh is not on the node that runs the job"),
    ],
)
def test_a_command_that_cannot_start(
    command: list[str], given: dict[str, str], code: int, failure: str, make: MakeSpec, start: Start, service
):
    folder = make(*command, **given)
    assert start(folder).wait(20) == code
    record = end_of(folder)
    assert (record.exit_code, record.kind) == (None, "config")
    assert failure in (record.failure or "")
    assert [end["failure"] for end in service.ends] == [record.failure]
    assert "running" not in service.phases()


def test_run_dir_in_a_value_is_the_folder_of_the_records(make: MakeSpec, start: Start, service: RecordingService):
    env = {"DUMP": "{run_dir}/rollouts:{run_dir}", "OTHER": "{run} ${run_dir}"}
    folder = make("sh", "-c", 'echo "$DUMP $OTHER"', env=env)
    assert start(folder).wait(30) == 0
    assert service.lines("driver") == [f"{folder}/run/rollouts:{folder}/run {{run}} ${{run_dir}}"]


def test_first_error_and_rank(make: MakeSpec, start: Start, service: RecordingService):
    script = r"""cd $CORRAL_RUN_DIR; mkdir -p logs/node-1; exec > logs/node-1/rank-6.log
        printf 'Traceback (most recent call last):\n  File "x.py"\nValueError: bad \033[1mtoken\033[0m\n'
        exit 1"""
    folder = make("bash", "-c", script)
    assert start(folder).wait(20) == 1
    record = end_of(folder)
    assert (record.first_error, record.failing_node, record.failing_rank) == ("ValueError: bad token", 1, 6)


def test_a_signal_to_the_agent_ends_the_command_and_what_it_started(make: MakeSpec, start: Start, service):
    script = """trap 'echo bye; exit 7' TERM; sleep 600 & echo $! > pids
        (trap '' TERM; sleep 600) & echo $! >> pids; echo up; wait"""
    folder = make("bash", "-c", script)
    agent = start(folder)
    service.wait_for(lambda: service.lines("driver") == ["up"])
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 7
    assert service.lines("driver") == ["up", "bye"]
    assert end_of(folder).exit_code == 7
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in (folder / "pids").read_text().split()))


@pytest.mark.parametrize(
    ("script", "answer", "code"),
    [
        ("trap '' TERM; echo up; while :; do sleep 0.1; done", {"stop": True, "grace": 0.2}, 137),
        ("echo up; exec sleep 600", 410, 143),  # the service is at another attempt of the job
    ],
)
def test_the_service_stops_a_command(script: str, answer, code: int, make: MakeSpec, start: Start, service):
    folder = make("bash", "-c", script)
    agent = start(folder)
    service.wait_for(lambda: service.lines("driver") == ["up"])
    service.orders = answer
    assert agent.wait(20) == code
    assert end_of(folder).exit_code == code
    assert service.lines("driver") == ["up"]


def test_the_service_is_down_all_the_time(make: MakeSpec, start: Start, service: RecordingService):
    service.stop()
    folder = make("bash", "-c", "echo 'error: no luck'; exit 4")
    agent = start(folder)
    until(lambda: (folder / "end.json").exists())
    record = end_of(folder)
    assert (record.exit_code, record.first_error) == (4, "error: no luck")
    assert agent.poll() is None  # it waits for the service
    agent.send_signal(signal.SIGTERM)
    time.sleep(0.1)  # two signals at the same time are one
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 4


def test_the_service_comes_back_elsewhere(make: MakeSpec, start: Start, service: RecordingService):
    folder = make(
        "bash", "-c", "echo 1; until test -e go; do sleep 0.02; done; echo 2", service_url="http://127.0.0.1:9"
    )
    agent = start(folder)
    (folder / "service.json").write_text("{")
    until(lambda: (folder / "driver.log").exists())
    (folder / "go").touch()
    (folder / "service.json").write_text(json.dumps({"url": service.url + "/"}))
    assert agent.wait(20) == 0
    assert service.lines("driver") == ["1", "2"]
    assert [end["exit_code"] for end in service.ends] == [0]


def test_killed_agent_neither_blocks_nor_silences_the_command(make: MakeSpec, start: Start, service):
    script = "echo up; until test -e go; do sleep 0.02; done; for i in $(seq 20000); do echo line $i; done; touch done"
    folder = make("bash", "-c", script)
    agent = start(folder)
    service.wait_for(lambda: service.lines("driver") == ["up"])
    agent.kill()
    agent.wait()
    (folder / "go").touch()
    until((folder / "done").exists)
    until(lambda: (folder / "driver.log").read_bytes().endswith(b"line 20000\n"))
    assert (folder / "driver.log").read_bytes().count(b"\n") == 20001
    assert not (folder / "end.json").exists()
    assert start(folder).wait(20) == 75  # a second agent does not run the command again
    assert end_of(folder).failure == "the agent of this attempt was lost while its command ran"
    assert end_of(folder).kind == "infra"
    assert len(service.lines("driver")) == 20001


def test_the_command_ends_with_a_killed_agent_below_a_supervisor(make: MakeSpec, start, service):
    folder = make("bash", "-c", "sleep 600 & echo $! > pids; echo $$ >> pids; echo up; wait")
    command = [sys.executable, "-m", "corral", "cluster", "local", "--nodes", "0", "--"]
    host = subprocess.Popen([*command, sys.executable, "-m", "corral.job.agent", str(folder)])
    try:
        service.wait_for(lambda: service.lines("driver") == ["up"])
        pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        agent = psutil.Process(pids[1]).parent()
        assert agent is not None
        agent.kill()
        assert host.wait(20) == 137
    finally:
        host.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not (folder / "end.json").exists()


def test_an_agent_started_after_the_end_only_delivers(make: MakeSpec, start: Start, service: RecordingService):
    folder = make("bash", "-c", "echo once; exit 5")
    service.stop()
    first = start(folder)
    until((folder / "end.json").exists)
    assert start(folder).wait(20) == 75  # while the first one is there
    first.kill()
    first.wait()
    service.start()
    assert start(folder).wait(20) == 5
    assert service.lines("driver") == ["once"]
    assert [end["exit_code"] for end in service.ends] == [5]


def test_a_stopped_rank_is_a_suspect(make: MakeSpec, start: Start, service: RecordingService):
    rank = (
        "import json, os, signal, sys, time; folder = os.environ['CORRAL_RUN_DIR'] + '/progress'; os.makedirs(folder);"
        "record = dict(rank=3, node=0, calls=8, state='running', method='update', time=time.time(), pid=os.getpid());"
        "open(folder + '/rank-3.json', 'w').write(json.dumps(record));"
        "record |= dict(rank=4, calls=9, pid=os.getppid());"
        "open(folder + '/rank-4.json', 'w').write(json.dumps(record));"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    folder = make(sys.executable, "-c", rank)
    agent = start(folder)
    service.wait_for(lambda: any(beat["suspects"] for beat in service.heartbeats))
    beat = next(beat for beat in service.heartbeats if beat["suspects"])
    assert beat["progress"] == 17
    assert [rank["calls"] for rank in beat["ranks"]] == [8, 9]
    assert "node-0 rank 3 (pid " in beat["suspects"][0]
    assert beat["suspects"][0].endswith("is stopped, in update")
    assert beat["suspects"][1] == "node-0 rank 3 is at call 8 of 9, running in update"
    os.kill(int(beat["suspects"][0].split("(pid ")[1].split(")")[0]), signal.SIGCONT)
    assert agent.wait(20) == 0


def test_usage(tmp_path: Path):
    for arguments, code in (([], 64), ([str(tmp_path)], 75)):
        done = subprocess.run(
            [sys.executable, "-m", "corral.job.agent", *arguments], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []
