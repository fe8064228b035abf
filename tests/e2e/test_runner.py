"""The runner on small real programs, as its own process: what it says, how it exits, what it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.cases import verdict_of, write_case

RUN_E2E = """
import argparse, sys
from corral.e2e.commands import add_parsers
from corral.errors import CorralError
parser = argparse.ArgumentParser()
add_parsers(parser.add_subparsers())
args = parser.parse_args()
try:
    sys.exit(args.run(args))
except CorralError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

SHORT = {"prepare": 30, "start": 30, "run": 2, "stop": 10}


def command(tmp_path: Path, case: Path | str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", RUN_E2E, "e2e", "run", str(case), "--runs", str(tmp_path / "runs"), *arguments]


def run(tmp_path: Path, program: str, *arguments: str, **changes) -> subprocess.CompletedProcess[str]:
    case = write_case(tmp_path, program, **changes)
    return subprocess.run(
        command(tmp_path, case, *arguments), capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_good_run_passes(tmp_path):
    done = run(tmp_path, "records(); print('working', flush=True)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_line(done).startswith("VERDICT: PASSED small in ")
    assert "working\n" in done.stdout
    assert re.search(r"gen +2\.50", done.stdout)
    verdict = verdict_of(tmp_path / "runs")
    assert (verdict["status"], verdict["exit_code"], verdict["child_exit_code"]) == ("PASSED", 0, 0)
    (console,) = (tmp_path / "runs").glob("small/*/console.log")
    assert console.read_text() == done.stdout


def test_output_is_passed_on_unchanged(tmp_path):
    done = subprocess.run(
        command(tmp_path, write_case(tmp_path, r"records(); os.write(1, b'a\xff\x00\r'); os.write(2, b'no newline')")),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"a\xff\x00\rno newline" in done.stdout


@pytest.mark.parametrize("code", [1, 3, 75, 78])
def test_a_verdict_on_the_log_stream_counts_for_nothing(tmp_path, code):
    done = run(tmp_path, f"records(); print('VERDICT: PASSED small in 1 s', flush=True); sys.exit({code})")
    assert done.returncode == code
    assert last_line(done) == f"VERDICT: FAILED small: exit code: expected 0, found {code}"
    assert verdict_of(tmp_path / "runs")["status"] == "FAILED"


def test_a_run_that_exits_0_without_records_fails(tmp_path):
    done = run(tmp_path, "print('all good')")
    assert done.returncode == 1
    assert last_line(done) == "VERDICT: FAILED small: plan.json: expected written, found no such file"


def test_a_command_that_closes_its_output_goes_on_and_is_judged_by_its_end(tmp_path):
    done = run(tmp_path, "os.close(1); os.close(2); records(); os._exit(9)")
    assert done.returncode == 9


def test_a_command_killed_by_a_signal(tmp_path):
    done = run(tmp_path, "records(); os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 137
    assert last_line(done) == "VERDICT: FAILED small: exit code: expected 0, found 137"


def test_an_expected_failure_passes(tmp_path):
    done = run(tmp_path, "sys.exit(78)", expect={"exit_code": 78})
    assert done.returncode == 0
    done = run(tmp_path, "sys.exit(0)", expect={"exit_code": 78})
    assert done.returncode == 1


def test_a_metric_expected_on_the_command_line(tmp_path):
    program = "plan(); metrics(**{'rollout/replayed': 0.0})"
    assert run(tmp_path, program, "--metric", "rollout/replayed=0").returncode == 0
    done = run(tmp_path, program, "--metric", "rollout/replayed=1")
    assert done.returncode == 1
    assert last_line(done) == "VERDICT: FAILED small: rollout/replayed: expected 1, found 0 on line 1"
    done = run(tmp_path, program, "--metric", "rollout/replayed")
    assert done.returncode == 78
    assert "expected NAME=NUMBER" in done.stderr


def test_a_run_past_its_deadline_is_ended(tmp_path):
    done = run(tmp_path, "records(); (run / 'pid').write_text(str(os.getpid())); time.sleep(600)", deadlines=SHORT)
    assert done.returncode == 124
    assert last_line(done) == "VERDICT: TIMEOUT small: the run had not ended after 2 s"
    (pid,) = (tmp_path / "runs").glob("small/*/pid")
    assert is_gone(int(pid.read_text()))


def test_a_run_that_does_not_start_is_ended(tmp_path):
    done = run(tmp_path, "time.sleep(600)", deadlines={**SHORT, "start": 1, "run": 300})
    assert done.returncode == 124
    assert last_line(done) == "VERDICT: TIMEOUT small: no plan.json was written: the run did not start after 1 s"


def test_a_run_that_ignores_sigterm_is_killed(tmp_path):
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); (run / 'pid').write_text(str(os.getpid())); time.sleep(600)"
    )
    done = run(tmp_path, program, deadlines={**SHORT, "start": 2, "stop": 1})
    assert done.returncode == 124
    (pid,) = (tmp_path / "runs").glob("small/*/pid")
    assert is_gone(int(pid.read_text()))


def test_a_process_left_behind_fails_the_run_and_is_killed(tmp_path):
    program = """
records()
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
(run / "pid").write_text(str(child.pid))
"""
    done = run(tmp_path, program)
    (pid,) = (tmp_path / "runs").glob("small/*/pid")
    assert done.returncode == 1
    assert last_line(done) == (
        f"VERDICT: FAILED small: processes left: expected 0, found 1 (pid {pid.read_text()} sleep 600)"
    )
    assert is_gone(int(pid.read_text()))


WAITING = """
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
def stop(number, frame):
    print("stopping on", signal.Signals(number).name, flush=True)
    child.kill()
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
(run / "pids.partial").write_text(f"{os.getpid()} {child.pid}")
(run / "pids.partial").rename(run / "pids")
while True:
    time.sleep(1)
"""


def start_waiting(tmp_path: Path, program: str = WAITING) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        command(tmp_path, write_case(tmp_path, program)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (found := list((tmp_path / "runs").glob("small/*/pids"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, [int(pid) for pid in found[0].read_text().split()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_forwarded_and_nothing_is_left(tmp_path, number, code):
    process, pids = start_waiting(tmp_path)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"stopping on {number.name}" in stdout
    assert stdout.splitlines()[-1] == f"VERDICT: INTERRUPTED small: {number.name}"
    assert all(is_gone(pid) for pid in pids)
    assert verdict_of(tmp_path / "runs")["status"] == "INTERRUPTED"


def test_a_second_signal_does_not_wait_for_the_command(tmp_path):
    process, pids = start_waiting(tmp_path, WAITING.replace("child.kill()", "return"))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "stopping on SIGINT" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert all(is_gone(pid) for pid in pids)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    program = "records()\nfor _ in range(20000): print('x' * 50)\n(run / 'done').touch()"
    process = subprocess.Popen(
        command(tmp_path, write_case(tmp_path, program)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 0, stderr
    assert stderr == b""
    assert list((tmp_path / "runs").glob("small/*/done"))


def test_the_environment_of_the_case_reaches_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("CORRAL_CACHE", str(tmp_path / "cache"))
    program = """
records()
import shutil
assert "RAY_ADDRESS" not in os.environ
assert os.path.samefile(shutil.which("python3"), sys.executable), shutil.which("python3")
assert os.environ["PLACE"] == os.environ["CORRAL_CACHE"] + "/e2e/rollouts", os.environ["PLACE"]
assert os.environ["BRACES"] == "{other} $HOME"
"""
    done = run(tmp_path, program, env={"PLACE": "{cache}/rollouts", "BRACES": "{other} $HOME"})
    assert done.returncode == 0, done.stdout


def test_two_runs_at_once_get_their_own_folders(tmp_path):
    case = write_case(tmp_path, "records()")
    both = [subprocess.Popen(command(tmp_path, case), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert len(list((tmp_path / "runs").glob("small/*/verdict.json"))) == 2


def test_a_command_that_is_not_there(tmp_path):
    done = run(tmp_path, "", command=["examples/absent.sh"])
    assert done.returncode == 78
    assert last_line(done).startswith("VERDICT: FAILED small: the case runs examples/absent.sh, which is not in ")
    done = run(tmp_path, "", command=["no-such-program-anywhere"])
    assert done.returncode == 78
    assert last_line(done) == "VERDICT: FAILED small: cannot start no-such-program-anywhere: No such file or directory"


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = run(tmp_path, "records()")
    assert done.returncode == 75
    assert "cannot make run folder" in done.stderr


def test_the_commands_import_nothing_heavy(tmp_path):
    program = (
        "import sys, corral.e2e.commands; print([m for m in ('yaml', 'psutil', 'torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
