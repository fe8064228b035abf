"""A sealed folder: any change to any file of any tree is found and named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.e2e.sealed import MANIFEST, damage_of, seal, unseal

NAMES = st.sampled_from(["a", "b", "c d", ".hidden", "ü"])
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=40), max_size=6)


def sealed_copy(tree: dict[str, bytes], folder: Path) -> list[str]:
    """The files that could be made: a name cannot be a file and a folder."""
    files = []
    for name, content in sorted(tree.items()):
        path = folder / name
        if any(parent.is_file() for parent in path.parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        files.append(name)
    seal(folder, {"made by": "a test"})
    return files


@settings(max_examples=40)
@given(TREES, st.data())
def test_any_change_is_found_and_named(tree, data):
    folder = Path(tempfile.mkdtemp(prefix="sealed-"))
    try:
        files = sealed_copy(tree, folder)
        assert damage_of(folder) == ""
        unseal(folder)
        assert damage_of(folder) == ""  # modes do not count: a copy of it is as good
        how = data.draw(st.sampled_from(["add", "change", "grow", "remove", "link"] if files else ["add"]))
        if how == "add":
            (folder / "new").write_bytes(b"")
            assert damage_of(folder) == "new was added"
            return
        name = data.draw(st.sampled_from(files))
        content = (folder / name).read_bytes()
        if how == "change" and content:
            (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif how == "remove":
            (folder / name).unlink()
        elif how == "link":
            (folder / name).rename(folder.with_name(f"{folder.name}.moved"))
            (folder / name).symlink_to(folder.with_name(f"{folder.name}.moved"))
        else:
            (folder / name).write_bytes(content + b"\0")
        assert damage_of(folder) in (f"{name} was changed", f"{name} is missing")
    finally:
        unseal(folder)
        shutil.rmtree(folder)
        folder.with_name(f"{folder.name}.moved").unlink(missing_ok=True)


# As an ordinary user, whom modes bind: root ignores them.
_ORDINARY = """
import os, sys
from pathlib import Path
from corral.e2e.caches import publish_rollouts, rollouts_in
from corral.e2e.case import Case
folder = Path(sys.argv[1])
if os.geteuid() == 0:
    os.chown(folder, 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
case = Case.model_validate({"name": "a", "summary": "s", "script": "s.sh", "rollouts": {"steps": [1]}})
(folder / "recorded/1").mkdir(parents=True)
(folder / "recorded/1/meta.json").write_text("{}")
for _ in range(2):
    kept = publish_rollouts(case, folder, folder / "recorded")
    assert kept == rollouts_in(case, folder)
    for attempt in ("new", "1/new", "1/meta.json"):
        try:
            (kept / attempt).open("a")
        except PermissionError:
            continue
        raise AssertionError(f"{attempt} was written")
    # What a run left that was killed between sealing and renaming; and a folder that somebody changed with force.
    left = kept.with_name(f".{kept.name}.new-0123")
    os.rename(kept, left)
    kept.mkdir()
    (kept / "foreign").write_text("")
    kept.chmod(0o555)
publish_rollouts(case, folder, folder / "recorded")
assert sorted(os.listdir(folder / "e2e")) == [kept.name, f"{kept.name}.lock"]
"""


def test_an_ordinary_user_cannot_write_into_it_and_can_replace_it():
    folder = tempfile.mkdtemp(prefix="sealed-")  # below /tmp, which everybody may enter
    try:
        subprocess.run([sys.executable, "-c", _ORDINARY, folder], check=True, timeout=60)
    finally:
        unseal(Path(folder))
        shutil.rmtree(folder)


def test_links_are_kept_as_links(tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "file").symlink_to("below")
    (folder / "gone").symlink_to("nowhere")
    seal(folder, {})
    assert damage_of(folder) == ""
    unseal(folder)
    (folder / "gone").unlink()
    (folder / "gone").symlink_to("elsewhere")
    assert damage_of(folder) == "gone was changed"
    assert not os.path.lexists(tmp_path / "nowhere")


def test_folders_that_are_none(tmp_path):
    assert damage_of(tmp_path / "none") == "no such folder"
    assert damage_of(tmp_path) == "it has no manifest"
    (tmp_path / ".corral-manifest.json").write_text('{"version": 2, "files": {}}')
    assert damage_of(tmp_path) == "its manifest has version 2, expected 1"
    (tmp_path / ".corral-manifest.json").write_text("[]")
    assert damage_of(tmp_path) == "its manifest is damaged"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    sealed_copy({"a": b"x"}, tmp_path)
    unseal(tmp_path)
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    assert damage_of(tmp_path) == "a was changed"


def test_a_manifest_that_never_ends(tmp_path):
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    assert damage_of(tmp_path) == "its manifest is damaged"
