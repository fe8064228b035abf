"""The cases that come with Corral, run as a user runs them. Each is its own proof; here they are run at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.e2e.result import read_result

DATA = os.environ.get("CORRAL_TEST_DATA", "/nonexistent")
GSM8K = pytest.mark.skipif(not Path(DATA, "gsm8k").is_dir(), reason="needs GSM8K under CORRAL_TEST_DATA/gsm8k")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(name: str, cache: Path, folder: Path, *options: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "corral", "e2e", "run", name, "--cache", str(cache), "--runs", str(folder)]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    ["two-node-grpo-sp", "one-node-eight", "hang-detection", pytest.param("smollm2-gsm8k", marks=GSM8K)],
)
def test_a_shipped_case_passes(name, cache, tmp_path):
    done = run(name, cache, tmp_path, seconds=3500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith(f"VERDICT: PASSED {name} in ")
    (folder,) = (tmp_path / name).iterdir()
    result = read_result(folder)
    assert result.status == "PASSED"
    assert all(check.ok for check in result.checks)
    assert (result.parity is not None) == (name == "two-node-grpo-sp")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_one_run_generates_the_next_one_replays(cache, tmp_path):
    first = run("two-node-ppo", cache, tmp_path / "first", "--metric", "rollout/replayed=0")
    assert first.returncode == 0, first.stdout[-4000:]
    (kept,) = (cache / "e2e").glob("rollouts-two-node-ppo-*[!k]")
    before = {path: path.lstat().st_mtime_ns for path in kept.rglob("*")}
    second = run("two-node-ppo", cache, tmp_path / "second", "--metric", "rollout/replayed=1")
    assert second.returncode == 0, second.stdout[-4000:]
    assert {path: path.lstat().st_mtime_ns for path in kept.rglob("*")} == before


def test_without_gsm8k_its_case_is_one_clear_line(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "CORRAL_TEST_DATA"}
    done = subprocess.run(
        [sys.executable, "-m", "corral", "e2e", "prepare", "smollm2-gsm8k", "--cache", str(tmp_path)],
        capture_output=True, text=True, env=env, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(
        "error: case smollm2-gsm8k: need data is found through $CORRAL_TEST_DATA, which is not set; "
    )
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing was downloaded before it was known
