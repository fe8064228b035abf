"""`corral doctor` on this machine: its words, its exit codes, what it leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from corral.findings import Finding, failures
from corral.manifest import manifest_digest


def doctor(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "corral", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | env)


def failed(file: Path) -> list[Finding]:
    return failures(Finding.from_dict(each) for each in json.loads(file.read_text())["findings"])


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    digest = manifest_digest(str(tmp_path))
    done = doctor(
        "--source", tmp_path, "--source-digest", digest, "--script", tmp_path / "run.sh", "--path", tmp_path,
        "--kind", "cpu", "--disk-mib", 1, "--json", tmp_path / "found.json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(": all passed")
    left = json.loads((tmp_path / "found.json").read_text())
    assert left["nodes"] == [{"node": 0, "name": "this machine", "address": "127.0.0.1"}]
    checks = {each["check"] for each in left["findings"]}
    assert checks >= {"nodes", "python", "packages", "corral", "source", "script", "paths", "shm", "disk", "memory"}
    assert checks >= {"dns", "interface"}
    assert left["seconds"] > 0


def test_all_that_is_wrong_is_named_and_what_cannot_be_decides_the_exit_code(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = doctor(
            "--port", port, "--path", tmp_path / "none", "--shm-mib", 1 << 29, "--json", tmp_path / "f.json"
        )  # fmt: skip
        only_port = doctor(MASTER_PORT=str(port))
    assert done.returncode == 78
    assert done.stdout.startswith(f"FAILED  paths: expected {tmp_path / 'none'} there, found No such file")
    assert [(each.check, each.node) for each in failed(tmp_path / "f.json")] == [
        ("paths", None), ("shm", 0), ("ports", 0)
    ]  # fmt: skip
    assert only_port.returncode == 75
    assert only_port.stdout.startswith(f"FAILED  ports on node-0: expected port {port} free, found Address already in")


def test_a_source_that_is_not_what_was_sent(tmp_path: Path) -> None:
    done = doctor("--source", tmp_path, "--source-digest", "0" * 64)
    assert done.returncode == 75
    assert done.stdout.startswith("FAILED  source on node-0: expected digest 000000000000, found digest ")


@pytest.mark.parametrize(
    ("arguments", "env", "code", "said"),
    [
        (["--source-digest", "0"], {}, 78, "--source-digest needs --source"),
        (["--port", "70000"], {}, 78, "'70000' is not a port"),
        ([], {"MASTER_PORT": "ssh"}, 78, "MASTER_PORT='ssh' is not a port"),
        (["--kind", "gpu", "--nodes", "2"], {}, 78, "needs a Ray cluster and RAY_ADDRESS is not set"),
        (["--wait", "0.1"], {"RAY_ADDRESS": "127.0.0.1:9"}, 75, "no Ray cluster at 127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], env: dict[str, str], code: int, said: str) -> None:
    done = doctor(*arguments, **env)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert said in done.stderr
