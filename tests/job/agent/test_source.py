"""Unpacking a bundle: what is refused, and that nothing outside the folder is touched."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.agent import source
from corral.job.agent.attempt import Attempt
from tests.job.agent.conftest import MakeSpec, Start, end_of

Member = tuple[str, bytes, dict[str, object]]  # name, content, fields of the header


def tar(*members: Member) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


Unpack = Callable[..., Attempt]


@pytest.fixture
def unpack(make: MakeSpec, tmp_path: Path) -> Unpack:
    def prepare(bundle: bytes, digest: str | None = None, script: str | None = None) -> Attempt:
        (tmp_path / "bundle.tar.gz").write_bytes(bundle)
        digest = digest or hashlib.sha256(bundle).hexdigest()
        path = str(tmp_path / "bundle.tar.gz")
        attempt = Attempt.load(make("true", bundle=digest, bundle_path=path, script=script, cwd="source"))
        source.prepare(attempt)
        return attempt

    return prepare


def test_a_bundle_is_unpacked_afresh(unpack: Unpack, tmp_path: Path):
    bundle = tar(
        ("run.sh", b"echo hi\n", {"mode": 0o755}),
        ("a/b/c.py", b"pass", {"mode": 0o644, "uid": 12345}),
        ("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "b/c.py"}),
        ("a/hard", b"", {"type": tarfile.LNKTYPE, "linkname": "a/b/c.py"}),
        ("empty/", b"", {"type": tarfile.DIRTYPE, "mode": 0o700}),
    )
    attempt = unpack(bundle, script="run.sh")
    (attempt.source / "leftover").touch()
    source.prepare(attempt)
    names = sorted(str(path.relative_to(attempt.source)) for path in attempt.source.rglob("*"))
    assert names == ["a", "a/b", "a/b/c.py", "a/hard", "a/link", "empty", "run.sh"]
    assert (attempt.source / "a/link").read_bytes() == (attempt.source / "a/hard").read_bytes() == b"pass"
    assert (attempt.source / "run.sh").stat().st_mode & 0o100
    assert sorted(path.name for path in attempt.folder.iterdir()) == ["source", "spec.json"]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("../out", b"x", {})], "leaves the source"),
        ([("/tmp/out", b"x", {})], "leaves the source"),
        ([("a/../../out", b"x", {})], "leaves the source"),
        ([("a\\b", b"x", {})], "backslash"),
        ([("out", b"", {"type": tarfile.SYMTYPE, "linkname": "../out"})], "link 'out' leaves it"),
        ([("out", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})], "link 'out' leaves it"),
        ([("d", b"", {"type": tarfile.SYMTYPE, "linkname": "."}), ("d/x", b"x", {})], "below a link"),
        ([("d", b"x", {}), ("d/x", b"x", {})], "below a link or a file"),
        ([("out", b"", {"type": tarfile.LNKTYPE, "linkname": "../../spec.json"})], "hard link 'out' is to no file"),
        ([("out", b"", {"type": tarfile.LNKTYPE, "linkname": "later"}), ("later", b"", {})], "is to no file before it"),
        ([("x", b"1", {}), ("./x", b"2", {})], "is in it twice"),
        ([("l", b"", {"type": tarfile.SYMTYPE, "linkname": "x"}), ("l", b"2", {})], "is in it twice"),
        ([("pipe", b"", {"type": tarfile.FIFOTYPE})], "neither a file, a folder nor a link"),
        ([("null", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})], "neither a file"),
        ([("x" * 2000, b"", {})], "too long"),
        ([("x" * 600, b"", {})], "File name too long"),
    ],
)
def test_hostile_members_are_refused(members: list[Member], said: str, unpack: Unpack, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        unpack(tar(("fine", b"fine", {}), *members))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-1", "bundle.tar.gz"]
    assert not (tmp_path / "attempt-1" / "source").exists()


def test_too_much_is_refused(unpack: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    big = tarfile.TarInfo("big")
    big.size = 600 << 20
    with pytest.raises(ConfigError, match="more than 512 MiB"):
        unpack(gzip.compress(big.tobuf() + bytes(1 << 20), 1))


@pytest.mark.parametrize("kind", ["header", "garbage", "cut", "no tar"])
def test_what_is_no_archive(kind: str, unpack: Unpack):
    whole = tar(("x", bytes(range(256)) * 400, {}))
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 100 << 20
    bundle = {
        "header": gzip.compress(header.tobuf() + bytes(1 << 20)),
        "garbage": b"no gzip at all",
        "cut": whole[: len(whole) // 2],
        "no tar": gzip.compress(b"text" * 500),
    }[kind]
    with pytest.raises(ConfigError, match=r"the source bundle (is no gzip|has headers)"):
        unpack(bundle)


def test_a_damaged_copy_and_none_at_all(unpack: Unpack, make: MakeSpec, tmp_path: Path):
    with pytest.raises(InfraError, match=r"has digest .*, not aaaaaaaaaaaa"):
        unpack(tar(("x", b"", {})), digest="a" * 64)
    (tmp_path / "bundle.tar.gz").unlink()
    with pytest.raises(InfraError, match="No such file"):
        source.prepare(Attempt.load(tmp_path / "attempt-1"))


def test_a_missing_script_is_a_configuration_failure(make: MakeSpec, start: Start, tmp_path: Path, service):
    bundle = tar(("examples/y.sh", b"echo never", {}))
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(bundle)
    digest = hashlib.sha256(bundle).hexdigest()
    given = {"bundle": digest, "bundle_path": str(path), "script": "examples/x.sh", "cwd": "source"}
    folder = make("bash", "examples/x.sh", **given)
    assert start(folder).wait(20) == 78
    record = end_of(folder)
    assert (record.failure, record.kind) == ("script examples/x.sh is not in the source", "config")
    assert (record.exit_code, record.bundle) == (None, digest)
    assert service.phases() == ["preflight"]
