"""Writing a dump while the process is killed, the disk is full or the folder is out of reach."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from corral.errors import InfraError
from corral.rollout.replay import Replay
from tests.rollout.recordings import FINGERPRINT, batch, requests, skip_plan

# Every call of a store that changes what is on disk or makes it last, in order, with an older dump in place.
MOMENTS = ["fsync", "fsync", "fsync", "rename", "rename", "fsync"]


def run_and_stop_at(moment: int, work: Callable[[], object]) -> None:
    """Run `work` in a child process and kill it with SIGKILL just before its n-th call of os.fsync or os.rename."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        calls = 0

        def stopping(call: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object) -> object:
                nonlocal calls
                if calls == moment:
                    os.write(writer, b"!")
                    signal.pause()
                calls += 1
                return call(*args)

            return wrapped

        os.fsync, os.rename = stopping(os.fsync), stopping(os.rename)
        try:
            work()
        finally:
            os._exit(1)
    os.close(writer)
    reached = os.read(reader, 1)
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert reached == b"!", f"the store has no call number {moment}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("moment", range(len(MOMENTS)))
def test_a_kill_in_the_middle_of_a_store_leaves_a_whole_dump_or_none(tmp_path: Path, moment: int) -> None:
    replay = Replay(skip_plan(tmp_path, action="repeat"))
    replay.store(1, batch(0), FINGERPRINT)
    run_and_stop_at(moment, lambda: replay.store(1, batch(1), FINGERPRINT))
    path = replay.find(1)
    # The old dump, then for the instant between the two renames none, then the new one.
    whole = {**dict.fromkeys(range(4), 0), 4: None, 5: 1}[moment]
    if whole is None:
        assert path is None
    else:
        assert path is not None
        loaded = replay.load(path, FINGERPRINT, step=1, requests=requests(batch(whole)))
        assert torch.equal(loaded.prompt_ids, batch(whole).prompt_ids)
    assert replay.find(2) == path
    again = replay.store(1, batch(2), FINGERPRINT)
    assert len(replay.load(again, FINGERPRINT, step=1, requests=requests(batch(2)))) == 4


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_in_the_middle_of_a_first_store_leaves_no_dump(tmp_path: Path, moment: int) -> None:
    replay = Replay(skip_plan(tmp_path, action="repeat"))
    run_and_stop_at(moment, lambda: replay.store(1, batch(), FINGERPRINT))
    assert replay.find(1) is None


def test_an_interrupt_in_the_middle_of_a_store_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Replay(skip_plan(tmp_path)).store(1, batch(), FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(tiny_disk: Path) -> None:
    replay = Replay(skip_plan(tiny_disk))
    replay.store(1, batch(), FINGERPRINT)
    large = batch().select([0] * 1000)
    with pytest.raises(
        InfraError, match=r"cannot write the rollout dump .*/2 \(\d+ bytes\): No space left on device; free"
    ):
        replay.store(2, large, FINGERPRINT)
    with pytest.raises(InfraError):
        replay.store(1, large, FINGERPRINT)
    assert [p.name for p in tiny_disk.iterdir()] == ["1"]
    assert len(replay.load(tiny_disk / "1", FINGERPRINT, step=1, requests=requests(batch()))) == 4


def test_a_file_size_limit_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(InfraError, match=r"/1 \(\d+ bytes\): File too large; free space there, raise") as caught:
            Replay(skip_plan(tmp_path)).store(1, batch(), FINGERPRINT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_out_of_reach_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InfraError, match=r"Not a directory; set skip.rollout.dump_dir to a folder that can be written"):
        Replay(skip_plan(tmp_path / "file" / "dumps")).store(1, batch(), FINGERPRINT)


def test_a_read_only_file_system_is_one_line() -> None:
    with pytest.raises(InfraError, match=r"set skip.rollout.dump_dir to a folder that can be written"):
        Replay(skip_plan("/proc/corral")).store(1, batch(), FINGERPRINT)
