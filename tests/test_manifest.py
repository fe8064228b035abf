"""Equal copies have equal digests; whatever a job could notice changes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.manifest import manifest_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "one"
    (made / "sub" / "deep").mkdir(parents=True)
    (made / "a.py").write_text("print(1)\n")
    (made / "sub" / "b\n.sh").write_text("")
    (made / "sub" / "link").symlink_to("../a.py")
    return made


def test_a_copy_has_the_same_digest_whenever_it_was_made(folder: Path) -> None:
    copy = folder.with_name("two")
    shutil.copytree(folder, copy, symlinks=True)
    os.utime(copy / "a.py", (1, 1))
    assert manifest_digest(str(copy)) == manifest_digest(str(folder))


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda at: (at / "a.py").write_text("print(2)\n"),
    "mode": lambda at: (at / "a.py").chmod(0o755),
    "folder mode": lambda at: (at / "sub").chmod(0o700),
    "name": lambda at: (at / "a.py").rename(at / "b.py"),
    "place": lambda at: (at / "a.py").rename(at / "sub" / "a.py"),
    "one more": lambda at: (at / "sub" / "deep" / "c").touch(),
    "an empty folder more": lambda at: (at / "sub" / "deep" / "d").mkdir(),
    "one less": lambda at: (at / "sub" / "b\n.sh").unlink(),
    "target": lambda at: ((at / "sub" / "link").unlink(), (at / "sub" / "link").symlink_to("../b.py")),
    "file for link": lambda at: ((at / "sub" / "link").unlink(), shutil.copy(at / "a.py", at / "sub" / "link")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_changes_it(folder: Path, change: Callable[[Path], object]) -> None:
    before = manifest_digest(str(folder))
    change(folder)
    assert manifest_digest(str(folder)) != before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        manifest_digest(str(tmp_path / "none"))
