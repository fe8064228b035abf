"""The archive of a source: the same files give the same bytes, and nothing gets in that should not."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.client.bundle import Budget, packed
from corral.job.client.files import git_head, list_files, source_root


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = write(
        tmp_path / "repo",
        {"train.sh": "#!/bin/bash\n", "src/a.py": "1", "src/ünï code\n.py": "2", ".gitignore": "*.log\nbuild/\n"},
    )
    (root / "train.sh").chmod(0o755)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return root


def digest_of(root: Path) -> str:
    with packed(list_files(root)) as bundle:
        assert hashlib.sha256(bundle.path.read_bytes()).hexdigest() == bundle.digest
        assert bundle.path.stat().st_size == bundle.size
        return bundle.digest


def test_git_decides_what_is_sent(repository):
    write(repository, {"new.py": "3", "run.log": "x", "build/big.bin": "x", ".hidden": "h", "sub/.gitignore": "secret"})
    write(repository, {"sub/secret": "s", "sub/open": "o"})
    (repository / "src/a.py").unlink()
    listing = list_files(repository)
    assert listing.paths == [
        ".gitignore", ".hidden", "new.py", "src/ünï code\n.py", "sub/.gitignore", "sub/open", "train.sh",
    ]  # fmt: skip
    assert (listing.in_git, listing.notices) == (True, [])


def test_equal_files_give_equal_bytes(repository, tmp_path):
    first = digest_of(repository)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    for path in clone.rglob("*"):
        if path.is_file() and ".git/" not in str(path):
            os.utime(path, (1, time.time() + 9))
            path.chmod(0o700 if path.name == "train.sh" else 0o600)
    assert digest_of(clone) == first
    (clone / "src/a.py").write_text("2")
    assert digest_of(clone) != first
    (repository / "src/a.py").chmod(0o755)
    assert digest_of(repository) != first


def test_the_archive_unpacks_to_the_files(repository, tmp_path):
    write(repository, {"deep/" * 30 + "x" * 120: "long"})
    (repository / "link").symlink_to("src/a.py")
    with packed(list_files(repository)) as bundle, tarfile.open(bundle.path) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "out", filter="data")
    assert bundle.members == {member.name for member in members}
    assert [member.name for member in members] == sorted(bundle.members)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
    out = tmp_path / "out"
    assert os.access(out / "train.sh", os.X_OK)
    assert not os.access(out / "src/a.py", os.X_OK)
    assert (out / "src/ünï code\n.py").read_text() == "2"
    assert os.readlink(out / "link") == "src/a.py"
    assert not bundle.path.exists()


def test_further_files_have_their_place_in_the_archive(repository, tmp_path):
    write(tmp_path / "elsewhere", {"1/tokens": "1 2 3", "train.sh": "echo mine\n"})
    listing = list_files(repository)
    listing.placed = {
        "recorded/1/tokens": tmp_path / "elsewhere/1/tokens",
        "train.sh": tmp_path / "elsewhere/train.sh",
    }
    with packed(listing) as bundle, tarfile.open(bundle.path) as archive:
        names = archive.getnames()
        assert names == sorted(names)
        assert set(names) == bundle.members
        assert archive.extractfile("recorded/1/tokens").read() == b"1 2 3"
        assert archive.extractfile("train.sh").read() == b"echo mine\n"
    with pytest.raises(ConfigError, match="recorded/1/tokens"), packed(listing, Budget(unpacked=10)):
        pass


def test_links_that_leave_are_left_out(repository, tmp_path):
    (tmp_path / "outside").write_text("secret")
    links = {
        "in": "train.sh", "src/up": "../train.sh", "broken": "nothing", "folder": "src",
        "out": "../outside", "absolute": str(repository / "train.sh"), "root": "/",
        "far": "src/../../outside", "hop": "out",
    }  # fmt: skip
    for name, target in links.items():
        (repository / name).symlink_to(target)
    listing = list_files(repository)
    assert set(listing.paths) & set(links) == {"in", "src/up", "broken", "folder"}
    assert listing.notices == ["links that leave the source are left out: absolute, far, hop and 2 more"]


def test_special_files_are_left_out(repository):
    os.mkfifo(repository / "pipe")
    assert "pipe" not in list_files(repository).paths


def test_submodules_go_along_and_other_repositories_do_not(repository, tmp_path):
    other = write(tmp_path / "other", {"lib.py": "5"})
    git(other, "init", "-q")
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "x")
    git(repository, "submodule", "add", "-q", str(other), "vendor/lib")
    git(repository, "clone", "-q", str(other), "stray")
    listing = list_files(repository)
    assert "vendor/lib/lib.py" in listing.paths
    assert not any(path.startswith("stray") or ".git/" in path for path in listing.paths)
    assert listing.notices == ["stray/ is a git repository of its own and not tracked: left out"]


def test_outside_git(tmp_path):
    files = {
        "a.sh": "",
        "d/b.py": "",
        ".env": "",
        ".ssh/id": "",
        "__pycache__/a.pyc": "",
        "venv/pyvenv.cfg": "",
        "venv/x": "",
        "runs/.gitignore": "*\n",
        "runs/e2e/report.html": "",
        "kept/.gitignore": "*.log\n",
        "kept/c.py": "",
    }
    root = write(tmp_path / "plain", files)
    (root / "link").symlink_to("d")
    listing = list_files(root)
    assert listing.paths == ["a.sh", "d/b.py", "kept/c.py", "link"]
    assert "is not a git working tree" in listing.notices[0]


def test_hooks_and_settings_of_the_repository_run_nothing(repository, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    evil = tmp_path / "evil.sh"
    evil.write_text(f"#!/bin/sh\ntouch {trap}\n")
    evil.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(evil))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert "train.sh" in list_files(repository).paths
    assert not trap.exists()


@pytest.mark.parametrize("name", [b"back\\slash", b"latin-\xe9"])
def test_names_no_archive_can_carry(repository, name):
    (Path(os.fsdecode(os.fsencode(repository) + b"/" + name))).write_text("x")
    with pytest.raises(ConfigError, match="rename") as caught:
        list_files(repository)
    assert "\n" not in str(caught.value)


def test_too_much_is_said_with_the_biggest_files(repository):
    for number in range(5):
        (repository / f"{number}.bin").write_bytes(os.urandom(number * 100_000))
    listing = list_files(repository)
    for budget in (Budget(unpacked=900_000), Budget(packed=900_000)):
        with (
            pytest.raises(ConfigError, match=r"the biggest: 4\.bin \(0\.4 MiB\), 3\.bin .*, 2\.bin") as caught,
            packed(listing, budget),
        ):
            pass
        assert "limit is 1 MiB" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    with packed(listing, Budget(packed=1_100_000)):
        pass


def test_a_file_that_vanishes_meanwhile_is_left_out(repository):
    listing = list_files(repository)
    (repository / "src/a.py").unlink()
    with packed(listing) as bundle:
        assert bundle.members == set(listing.paths) - {"src/a.py"}


def test_what_cannot_be_read_is_said():
    """Not even root reads everything: a folder of somebody else, a file system that refuses."""
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder) / "source", {"a.sh": "1", "closed/b": "2"})
        for path, mode in ((root, 0o755), (Path(folder), 0o755), (root / "closed", 0)):
            path.chmod(mode)
        everything = os.geteuid() == 0
        if everything:
            os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match=re.escape(f"{root}/closed: Permission denied")) as refused:
                list_files(root)
        finally:
            if everything:
                os.seteuid(0)
        assert "\n" not in str(refused.value)


def test_a_full_disk_is_said(repository, monkeypatch):
    """What may be written to one file ends before the archive does."""
    (repository / "noise").write_bytes(os.urandom(1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with (
            pytest.raises(InfraError, match=r"cannot pack the source into .*: File too large; TMPDIR"),
            packed(list_files(repository)),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_source_is_the_working_tree_around(repository, monkeypatch, tmp_path):
    monkeypatch.chdir(repository / "src")
    assert source_root(None) == repository.resolve()
    monkeypatch.chdir(tmp_path)
    assert source_root(None) == tmp_path
    assert source_root(Path("repo")) == repository.resolve()
    with pytest.raises(ConfigError, match="not a folder"):
        source_root(Path("repo/train.sh"))
    assert git_head(tmp_path) is None
    commit, branch = git_head(repository) or ("", "")
    assert len(commit) == 40
    git(repository, "checkout", "-q", "--detach")
    assert git_head(repository) == (commit, "")
    assert branch
