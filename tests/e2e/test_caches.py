"""Caches as a user meets them: made once by a real command, by one of many runs, whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from corral.e2e.caches import cache_key
from corral.e2e.case import Cache
from tests.e2e.cases import write_case
from tests.e2e.test_runner import command, last_line, run

MAKE = ["data", "arithmetic", "{out}", "--train", "8", "--test", "4"]
CACHES = {"data": {"make": MAKE}}
USE = "records(); assert sorted(os.listdir(os.environ['DATA'])) == ['test.parquet', 'train.parquet']"
ENV = {"DATA": "{data}"}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CORRAL_CACHE", str(folder))
    return folder / "e2e"


def folder_of(root: Path, make: list[str] = MAKE) -> Path:
    return root / f"data-{cache_key(Cache(tuple(make), 1))}"


def test_a_cache_is_made_once(tmp_path, root):
    first = run(tmp_path, USE, caches=CACHES, env=ENV)
    assert first.returncode == 0, first.stdout
    assert "preparing data: corral data arithmetic" in first.stdout
    inode = folder_of(root).stat().st_ino
    second = run(tmp_path, USE, caches=CACHES, env=ENV)
    assert second.returncode == 0
    assert "preparing" not in second.stdout
    assert folder_of(root).stat().st_ino == inode


def test_what_is_made_decides_the_folder():
    keys = {
        cache_key(Cache(("data", "{out}", "--seed", "0"), 1)),
        cache_key(Cache(("data", "{out}", "--seed", "1"), 1)),
        cache_key(Cache(("data", "{out}", "--seed", "0"), 2)),
        cache_key(Cache(("data", "{out}", "--seed 0"), 1)),
    }
    assert len(keys) == 4


def test_two_runs_at_once_make_it_once(tmp_path, root):
    case = write_case(tmp_path, USE, caches=CACHES, env=ENV)
    both = [subprocess.Popen(command(tmp_path, case), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum(output.count("preparing data") for output in outputs) == 1
    assert not list(root.glob(".*"))


def test_what_a_killed_run_left_is_not_used(tmp_path, root):
    partial = folder_of(root).with_name(f".{folder_of(root).name}.new-0123")
    partial.mkdir(parents=True)
    (partial / "junk").write_text("half")
    done = run(tmp_path, USE, caches=CACHES, env=ENV)
    assert done.returncode == 0, done.stdout
    assert not partial.exists()


def test_a_command_that_fails_leaves_no_folder_and_its_exit_code(tmp_path, root):
    make = ["data", "gsm8k", str(tmp_path / "absent"), "{out}"]
    done = run(tmp_path, USE, caches={"data": {"make": make}}, env=ENV)
    assert done.returncode == 1
    assert last_line(done) == "VERDICT: FAILED small: preparing cache data failed with exit code 1"
    assert not folder_of(root, make).exists()
    assert not list(root.glob(".*"))


def test_a_cache_that_takes_too_long(tmp_path, root):
    make = ["data", "arithmetic", "{out}", "--train", "100000000"]
    deadlines = {"prepare": 2, "start": 30, "run": 60, "stop": 10}
    done = run(tmp_path, USE, caches={"data": {"make": make}}, env=ENV, deadlines=deadlines)
    assert done.returncode == 124
    assert last_line(done) == "VERDICT: TIMEOUT small: data was not prepared after 2 s"
    assert not folder_of(root, make).exists()
    assert not list(root.glob(".*"))


def test_a_signal_while_preparing(tmp_path, root):
    make = ["data", "arithmetic", "{out}", "--train", "100000000"]
    case = write_case(tmp_path, USE, caches={"data": {"make": make}}, env=ENV)
    process = subprocess.Popen(command(tmp_path, case), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert "preparing data" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "VERDICT: INTERRUPTED small: SIGINT"
    assert not list(root.glob(".*"))


def test_a_cache_folder_that_cannot_be_written(tmp_path, root):
    root.parent.write_text("a file")
    done = run(tmp_path, USE, caches=CACHES, env=ENV)
    assert done.returncode == 75
    assert "VERDICT: FAILED small: cannot prepare cache data in " in last_line(done)


def test_the_default_folder_is_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("CORRAL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    done = run(tmp_path, USE, caches=CACHES, env=ENV)
    assert done.returncode == 0, done.stdout
    assert os.listdir(tmp_path / "home/.cache/corral/e2e")
    shutil.rmtree(tmp_path / "home")
