"""A file is the old one or the new one, and nothing else is left, whatever stops the writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corral import atomic
from corral.errors import InfraError


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path: Path):
    target = tmp_path / "a" / "b" / "file.txt"
    for text in ("first", "zweite Fassung: ü"):
        atomic.write_text(target, text)
        assert target.read_text(encoding="utf-8") == text
        assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_stopped_in_between_leaves_the_old_file(tmp_path: Path, monkeypatch, stop):
    target = tmp_path / "file.txt"
    atomic.write_text(target, "old")

    def write_half(self: Path, data: str, **how: str) -> int:
        with self.open("w") as file:
            file.write(data[:2])
        raise stop

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises((KeyboardInterrupt, InfraError)) as found:
        atomic.write_text(target, "newer")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    if isinstance(stop, OSError):
        assert (
            str(found.value) == f"cannot write {target}: No space left on device; free space or choose another folder"
        )


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(InfraError, match=r"cannot write .*taken/file"):
        atomic.write_text(tmp_path / "taken" / "file.txt", "text")


def fill(path: Path, text: str) -> None:
    with atomic.new_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)


@pytest.mark.parametrize("before", ["nothing", "folder", "empty folder", "file", "link"])
def test_a_folder_takes_the_place_of_whatever_was_there(tmp_path: Path, before: str):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "a" / "target"
    target.parent.mkdir()
    {
        "nothing": lambda: None,
        "folder": lambda: fill(target, "old"),
        "empty folder": target.mkdir,
        "file": lambda: target.write_text("old"),
        "link": lambda: target.symlink_to(tmp_path / "elsewhere"),
    }[before]()
    fill(target, "new")
    assert (target / "inner" / "file").read_text() == "new"
    assert not target.is_symlink()
    assert list(target.parent.iterdir()) == [target]
    assert (tmp_path / "elsewhere").is_dir()


# Every call that changes what is on disk or makes it last, in order, when a folder is replaced.
CALLS = ["fsync file", "fsync inner", "fsync folder", "rename", "rename", "fsync parent"]


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_folder_stopped_in_between_is_the_old_one_or_the_new(tmp_path: Path, monkeypatch, number: int, stop):
    target = tmp_path / "target"
    fill(target, "old")
    calls = 0

    def stopping(call):
        def wrapped(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number + 1:
                raise stop
            return call(*args)

        return wrapped

    monkeypatch.setattr(os, "fsync", stopping(os.fsync))
    monkeypatch.setattr(os, "rename", stopping(os.rename))
    with pytest.raises((KeyboardInterrupt, OSError)):
        fill(target, "new")
    assert (target / "inner" / "file").read_text() == ("new" if number == len(CALLS) - 1 else "old")
    assert list(tmp_path.iterdir()) == [target]


def test_a_block_that_fails_leaves_no_folder(tmp_path: Path):
    def fail(path: Path) -> None:
        with atomic.new_folder(path) as folder:
            (folder / "file").write_text("half")
            raise ValueError

    with pytest.raises(ValueError):
        fail(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_swept(tmp_path: Path):
    for name in (".step_1.new-0a", ".step_2.old-0b", ".other.new-0c", "step_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    atomic.sweep(tmp_path, "step_*")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.new-0c", "step_1"]


def test_a_removed_folder_is_gone(tmp_path: Path):
    fill(tmp_path / "target", "old")
    for _ in range(2):
        atomic.remove_folder(tmp_path / "target")
        assert list(tmp_path.iterdir()) == []
