"""A file is the old one or the new one, and nothing else is left, whatever stops the writing."""

from __future__ import annotations

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
