"""The command and the file of its output, and the end record on the disk."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from corral.errors import InfraError
from corral.job.agent import command as command_module
from corral.job.agent.attempt import Attempt
from corral.job.agent.command import Command
from corral.job.agent.run import environment
from corral.job.protocol.agent import EndRecord
from tests.job.agent.conftest import MakeSpec, end_of

BASH = ["bash", "-c"]


def wait(command: Command) -> int:
    while (code := command.wait(5.0)) is None:
        pass
    return code


def test_a_full_disk_is_named(tmp_path: Path):
    command = Command([*BASH, "echo 1; sleep 0.3; echo 2; exit 1"], tmp_path, os.environ, Path("/dev/full"))
    assert wait(command) in (1, 128 + signal.SIGPIPE)
    assert command.sweep() == "its output could not be kept: No space left on device"


def test_output_after_a_polite_signal_to_everybody_is_kept(tmp_path: Path):
    script = "trap 'sleep 0.2; echo last words; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    command = Command([*BASH, script], tmp_path, os.environ, tmp_path / "out")
    while not (tmp_path / "out").read_bytes():
        assert command.wait(0.01) is None
    bash = psutil.Process(command.pid)
    for process in [bash, *bash.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a `sleep` of the loop
            process.send_signal(signal.SIGTERM)
    assert wait(command) == 9
    assert command.sweep() is None
    assert (tmp_path / "out").read_text().endswith("last words\n")


def test_a_daemon_that_holds_the_output_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command_module, "SWEEP_BOUND", 0.2)
    script = "setsid bash -c 'echo $$; exec sleep 600' & until test -s out; do sleep 0.01; done"
    command = Command([*BASH, script], tmp_path, os.environ, tmp_path / "out")
    assert wait(command) == 0
    assert command.sweep() is None
    daemon = psutil.Process(int((tmp_path / "out").read_text()))
    assert daemon.is_running()
    daemon.kill()  # which is the supervisor's business


def test_no_place_for_the_output(tmp_path: Path):
    with pytest.raises(InfraError, match="cannot keep the output"):
        Command(["true"], tmp_path, os.environ, tmp_path / "no" / "folder")


def test_the_environment_of_a_command(make: MakeSpec):
    attempt = Attempt.load(make("true", env={"A": "1", "PYTHONUNBUFFERED": ""}, secrets={"S": "2"}))
    env = environment(attempt, {"PATH": "/bin", "CORRAL_TOKEN": "x", "RAY_ADDRESS": "127.0.0.2:1"})
    assert env == {
        "PATH": "/bin",
        "RAY_ADDRESS": "127.0.0.2:1",
        "A": "1",
        "S": "2",
        "PYTHONUNBUFFERED": "",
        "CORRAL_RUN_DIR": str(attempt.folder / "run"),
        "CORRAL_JOB_ID": "rj-0123456789ab",
        "CORRAL_JOB_ATTEMPT": "1",
        "CORRAL_JOB_NODES": "2",
        "CORRAL_JOB_DEVICES": "4",
        "CORRAL_RANK_OUTPUT": "files",
    }


def test_an_end_record_is_whole_or_none(make: MakeSpec):
    folder = make("true")
    attempt = Attempt.load(folder)
    attempt.reserve()
    assert attempt.read_end() is None
    record = EndRecord(job_id="rj-0123456789ab", attempt=1, exit_code=3, started=1.0, ended=2.0).sealed()
    attempt.write_end(record)
    assert attempt.read_end() == record == end_of(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["end.json", "spec.json"]
    text = (folder / "end.json").read_text()
    for broken in (text[:-20], text.replace('"exit_code":3', '"exit_code":0'), ""):
        (folder / "end.json").write_text(broken)
        assert attempt.read_end() is None


@pytest.mark.parametrize("text", ["", "{", '{"job_id": "hunter2"}'])
def test_a_broken_spec_is_told_without_its_values(text: str, tmp_path: Path):
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(InfraError, match=r"spec.json is no agent spec \(ValidationError\)"):
        Attempt.load(tmp_path)
