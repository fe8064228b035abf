"""Needs and recordings as a user meets them: made once by a real command, by one of many runs, whole or not at all, and
never used when they are not what they were."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import corral
from corral.e2e.caches import (
    Interrupted,
    PreparationError,
    cache_root,
    look_up,
    need_key,
    prepare,
    publish_rollouts,
    require,
    rollouts_folder,
    rollouts_in,
)
from corral.e2e.case import Case, Need
from corral.e2e.process import Signals
from corral.errors import ConfigError, DeadlineError, InfraError

MAKE = ["data", "arithmetic", "{out}", "--train", "8", "--test", "4"]
ENDLESS = ["data", "arithmetic", "{out}", "--train", "100000000"]
FILES = [".corral-manifest.json", "test.parquet", "train.parquet"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def case_of(need: dict[str, Any], **more: Any) -> Case:
    document = {"name": "small", "summary": "s", "command": ["true", "{data}"], "needs": {"data": need}}
    return Case.model_validate({**document, **more})


def made(case: Case, root: Path) -> tuple[Path, list[str]]:
    """The folder of the need, and what was said."""
    lines: list[str] = []
    return prepare(case, root, lines.append, Signals())["data"], lines


def started(root: Path, folder: Path, make: list[str] = MAKE) -> subprocess.Popen[str]:
    """`corral e2e prepare` in a process of its own."""
    file = folder / "small.yaml"
    file.write_text(f"name: small\nsummary: s\ncommand: ['true', '{{data}}']\nneeds: {{data: {{make: {make}}}}}\n")
    return subprocess.Popen(
        [sys.executable, "-m", "corral", "e2e", "prepare", str(file), "--cache", str(root)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder with inode, time and mode: equal when nothing was touched."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        found[str(path)] = (about.st_ino, about.st_mtime_ns, about.st_mode)
    return found


# Making --------------------------------------------------------------------------------------------------------------


def test_a_need_is_made_once_and_nobody_touches_it_again(root):
    folder, lines = made(case_of({"make": MAKE}), root)
    assert lines[0] == "preparing data: corral data arithmetic {out} --train 8 --test 4"
    assert lines[1] == f"{folder}/train.parquet: 8 rows"
    assert sorted(os.listdir(folder)) == FILES
    before = state_of(root)
    assert made(case_of({"make": MAKE}), root) == (folder, [])
    assert require(case_of({"make": MAKE}), root) == {"data": folder}
    assert state_of(root) == before
    for path in [folder, *folder.rglob("*")]:
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH), path


def test_what_is_made_decides_the_folder(monkeypatch):
    def key(*make: str, revision: int = 1) -> str:
        return need_key(Need(make=list(make), revision=revision), {"SEED": os.environ["SEED"]})

    monkeypatch.setenv("SEED", "7")
    keys = [key("{out}", "--seed", "0"), key("{out}", "--seed", "1"), key("{out}", "--seed 0"), key("{out}{env.SEED}")]
    keys.append(key("{out}", "--seed", "0", revision=2))
    monkeypatch.setenv("SEED", "8")
    keys.append(key("{out}{env.SEED}"))
    monkeypatch.setattr(corral, "__version__", "99.0")
    keys.append(key("{out}", "--seed", "0"))
    assert len(set(keys)) == 7


def test_two_runs_at_once_make_it_once(tmp_path, root):
    both = [started(root, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum(out.count("preparing data") for out, _ in outputs) == 1
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    assert not list((root / "e2e").glob(".*"))


def test_after_kill_9_the_next_run_makes_it(tmp_path, root):
    process = started(root, tmp_path, ENDLESS)
    assert process.stdout is not None
    assert "preparing data" in process.stdout.readline()
    below = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *below]:
        one.kill()
    process.communicate(timeout=60)
    psutil.wait_procs(below, timeout=60)
    (partial,) = (root / "e2e").glob(".data-*")
    # The same folder is asked for again, with a command that ends: its key is forged for that.
    case = case_of({"make": MAKE})
    folder = look_up(case, root)["data"]
    partial.rename(partial.with_name(f".{folder.name}.new-0123"))
    (folder.parent / f".{folder.name}.new-0123").chmod(0o555)
    assert made(case, root)[0] == folder
    assert sorted(os.listdir(folder)) == FILES
    assert not list((root / "e2e").glob(".*"))


def test_a_command_that_fails_leaves_its_exit_code_and_its_last_words(tmp_path, root):
    need = {"make": ["data", "gsm8k", str(tmp_path / "absent"), "{out}"], "about": "get it from the fair"}
    with pytest.raises(PreparationError) as raised:
        made(case_of(need), root)
    assert raised.value.exit_code == 1
    assert str(raised.value).startswith("case small: need data was not made, exit code 1: ")
    assert str(tmp_path / "absent") in str(raised.value)
    assert str(raised.value).endswith("; get it from the fair")
    assert [path.suffix for path in (root / "e2e").iterdir()] == [".lock"]


def test_a_command_that_makes_nothing(root):
    with pytest.raises(PreparationError, match="case small: need data: its command made no files"):
        made(case_of({"make": ["--version", "{out}"]}), root)


def test_a_command_that_takes_too_long(root):
    with pytest.raises(DeadlineError, match=r"need data was not made after 1 s; deadlines\.prepare"):
        made(case_of({"make": ENDLESS}, deadlines={"prepare": 1}), root)
    assert not list((root / "e2e").glob("[.d]*[!k]"))


def test_a_signal_while_it_is_made(tmp_path, root):
    process = started(root, tmp_path, ENDLESS)
    assert process.stdout is not None
    assert "preparing data" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert not list((root / "e2e").glob("[.d]*[!k]"))


def test_a_signal_while_another_run_makes_it(tmp_path, root):
    other = started(root, tmp_path, ENDLESS)
    assert other.stdout is not None
    other.stdout.readline()
    signals = Signals()
    signals.received.append(signal.SIGTERM)
    try:
        with pytest.raises(Interrupted) as raised:
            prepare(case_of({"make": ENDLESS}), root, print, signals)
        assert raised.value.exit_code == 143
    finally:
        other.send_signal(signal.SIGTERM)
        other.communicate(timeout=60)


def test_another_run_that_takes_too_long(tmp_path, root):
    other = started(root, tmp_path, ENDLESS)
    assert other.stdout is not None
    other.stdout.readline()
    try:
        with pytest.raises(DeadlineError, match=r"another run has held .*data-\w+\.lock for 0\.2 s"):
            made(case_of({"make": ENDLESS}, deadlines={"prepare": 0.2}), root)
    finally:
        other.send_signal(signal.SIGTERM)
        other.communicate(timeout=60)


def test_a_cache_that_cannot_be_written(root):
    root.write_text("a file")
    with pytest.raises(InfraError, match=r"cannot make need data in .*; CORRAL_CACHE or --cache names another"):
        made(case_of({"make": MAKE}), root)


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None, {}) == tmp_path / ".cache/corral"
    assert cache_root(None, {"CORRAL_CACHE": "~/other"}) == tmp_path / "other"
    assert cache_root(Path("here"), {"CORRAL_CACHE": "/there"}) == Path.cwd() / "here"


# Damage and misses ---------------------------------------------------------------------------------------------------


def test_a_damaged_folder_is_refused_by_name_and_made_anew(root):
    case = case_of({"make": MAKE})
    folder, _ = made(case, root)
    file = folder / "train.parquet"
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        require(case, root)
    key = folder.name.removeprefix("data-")
    assert f"need data was changed: {folder}: train.parquet was changed (key {key}: corral data" in str(raised.value)
    again, lines = made(case, root)
    assert again == folder
    assert lines[0] == f"need data: {folder}: train.parquet was changed; it is made anew"
    require(case, root)
    assert sorted(os.listdir(folder)) == FILES
    assert not list((root / "e2e").glob(".*"))


def test_a_miss_names_the_key_the_folder_and_the_command(root):
    case = case_of({"make": [*MAKE, "--seed", "a b"], "revision": 3})
    folder = look_up(case, root)["data"]
    with pytest.raises(ConfigError) as raised:
        require(case, root)
    key = need_key(case.needs["data"])
    assert folder == root / "e2e" / f"data-{key}"
    assert str(raised.value) == (
        f"case small: need data is not in the cache: no folder {folder} (key {key}: "
        f"corral data arithmetic {{out}} --train 8 --test 4 --seed 'a b', revision 3, corral {corral.__version__}); "
        "make it with `corral e2e prepare small`"
    )
    assert not root.exists()


def test_a_folder_that_is_used_as_it_is(tmp_path, root, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    for path in (str(tmp_path), "{env.PLACE}", "{env.PLACE}/."):
        assert made(case_of({"path": path}), root) == (tmp_path, [])
    assert not root.exists()
    with pytest.raises(ConfigError, match=r"^case small: need data: no folder /none; nothing makes it; ask Eve$"):
        made(case_of({"path": "/none", "about": "ask Eve"}), root)


def test_a_variable_that_is_not_set(root, monkeypatch):
    monkeypatch.delenv("PLACE", raising=False)
    for need in ({"path": "{env.PLACE}"}, {"make": ["{env.PLACE}", "{out}"]}):
        with pytest.raises(ConfigError, match=r"^case small: need data is found through \$PLACE, which is not set"):
            made(case_of(need), root)


# Recorded generations ------------------------------------------------------------------------------------------------


BELOW = "experiment_project/GBS16_N1"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """As the trainer leaves it: below the names of the experiment and its sizes."""
    folder = tmp_path / "recorded"
    for step in (1, 2, 3):
        (folder / BELOW / str(step)).mkdir(parents=True)
        (folder / BELOW / str(step) / "meta.json").write_text(f"step {step}")
    return folder


def with_rollouts(*steps: int, revision: int = 1, **more: Any) -> Case:
    return case_of({"make": MAKE}, rollouts={"steps": list(steps), "revision": revision}, **more)


def test_what_was_recorded_is_kept_and_found(root, recorded):
    case = with_rollouts(1, 3)
    assert rollouts_in(case, root) is None
    folder = publish_rollouts(case, root, recorded)
    assert folder is not None
    assert rollouts_in(case, root) == folder
    assert sorted(os.listdir(folder / BELOW)) == ["1", "3"]
    assert (folder / BELOW / "3/meta.json").read_text() == "step 3"
    assert not (folder / BELOW / "1/meta.json").stat().st_mode & 0o222
    (recorded / BELOW / "1/meta.json").write_text("of a later run")
    assert publish_rollouts(case, root, recorded) is None  # the first one stays
    assert (folder / BELOW / "1/meta.json").read_text() == "step 1"


def test_a_recording_without_a_step_is_not_kept(root, recorded):
    assert publish_rollouts(with_rollouts(1, 4), root, recorded) is None
    assert publish_rollouts(with_rollouts(1), root, recorded / "none") is None
    assert not root.exists()


def test_a_damaged_recording_is_named_not_used_and_replaced(root, recorded):
    case = with_rollouts(1)
    folder = publish_rollouts(case, root, recorded)
    assert folder is not None
    (folder / BELOW / "1/meta.json").chmod(0o644)
    (folder / BELOW / "1/meta.json").write_text("something else")
    lines: list[str] = []
    assert rollouts_in(case, root, lines.append) is None
    assert lines == [f"rollouts {folder} are not used: {BELOW}/1/meta.json was changed; they are recorded anew"]
    assert publish_rollouts(case, root, recorded) == folder
    assert (folder / BELOW / "1/meta.json").read_text() == "step 1"


def test_everything_that_decides_what_is_generated_is_in_the_key(root):
    cases = [
        with_rollouts(1),
        with_rollouts(2),
        with_rollouts(1, args=["a"]),
        with_rollouts(1, env={"A": "b"}),
        with_rollouts(1, command=["false"]),
        with_rollouts(1, name="other"),
        with_rollouts(1, revision=2),
        case_of({"make": MAKE, "revision": 2}, rollouts={"steps": [1]}),
        case_of({"path": "/data"}, rollouts={"steps": [1]}),
    ]
    assert len({rollouts_folder(case, root) for case in cases}) == len(cases)
    assert rollouts_folder(with_rollouts(1, summary="other words"), root) == rollouts_folder(cases[0], root)


def test_of_many_runs_that_end_at_once_one_keeps_its_recording(root, recorded):
    kept: list[Path | None] = []
    gate = threading.Barrier(6)

    def end() -> None:
        gate.wait()
        kept.append(publish_rollouts(with_rollouts(1, 2), root, recorded))

    threads = [threading.Thread(target=end) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(kept) == 6
    assert sum(folder is not None for folder in kept) == 1
    assert rollouts_in(with_rollouts(1, 2), root) is not None


def test_no_reader_sees_half_a_recording(root, recorded):
    """While it is damaged and replaced again and again, a reader finds it whole or not at all."""
    case = with_rollouts(1, 2, 3)
    over = threading.Event()
    seen: list[list[str]] = []

    def look() -> None:
        while not over.is_set():
            folder = rollouts_in(case, root)
            if folder is not None:
                seen.append(sorted(os.listdir(folder / BELOW)) if folder.is_dir() else [])
            time.sleep(0)

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(20):
        folder = publish_rollouts(case, root, recorded)
        assert folder is not None
        (folder / ".corral-manifest.json").chmod(0o644)
        (folder / ".corral-manifest.json").write_text("torn")
    over.set()
    reader.join(60)
    assert all(names in (["1", "2", "3"], []) for names in seen)
