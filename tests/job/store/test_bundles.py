"""Sources of jobs: whole or absent, named by what is in them, listed without being unpacked."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from corral.errors import ConfigError
from corral.job.store.bundles import Bundles


def archive(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return raw.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def put(bundles: Bundles, content: bytes, digest: str | None = None, piece: int = 1000) -> str:
    digest = digest or hashlib.sha256(content).hexdigest()
    with bundles.receive(digest) as upload:
        for at in range(0, len(content), piece):
            upload.write(content[at : at + piece])
    return digest


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_bundle_is_there_once_it_is_whole(tmp_path):
    bundles = Bundles(tmp_path)
    content = archive(("run.sh", b"echo"), ("./sub/../sub/a.py", b"x" * 5000), link("l", "run.sh"))
    digest = put(bundles, content)
    assert bundles.has(digest)
    assert bundles.path(digest) == tmp_path / "bundles" / digest[:2] / f"{digest}.tar.gz"
    assert bundles.path(digest).read_bytes() == content
    assert bundles.members(digest) == frozenset({"run.sh", "sub/a.py", "l"})
    assert put(Bundles(tmp_path), content) == digest
    assert files(tmp_path) == [bundles.path(digest)]
    assert bundles.path(digest).stat().st_mode & 0o777 == 0o600


def test_another_content_too_much_or_a_broken_upload_leaves_nothing(tmp_path):
    bundles = Bundles(tmp_path, packed=2000)
    with pytest.raises(ConfigError, match="not 0000"):
        put(bundles, b"other", digest="0" * 64)
    with pytest.raises(ConfigError, match="limit of 2000 bytes"):
        put(bundles, b"x" * 2001)
    with pytest.raises(TypeError), bundles.receive("1" * 64) as upload:
        upload.write("the client went away")
    assert files(tmp_path) == []
    assert not bundles.has("0" * 64)


def test_what_a_killed_service_left_is_swept(tmp_path):
    left = tmp_path / "bundles" / "00" / ".upload-abc"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    Bundles(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("name", ["../" * 8 + "etc/passwd", "A" * 64, "", "0" * 63, "0" * 64 + "\n"])
def test_only_a_digest_names_a_bundle(tmp_path, name):
    with pytest.raises(ConfigError, match="64 hex digits"):
        Bundles(tmp_path).has(name)


def device(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.CHRTYPE
    return info


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive at all", "no gzip-compressed tar"),
        (b"", "no gzip-compressed tar"),
        (gzip.compress(b"not a tar archive" * 100), "no gzip-compressed tar"),
        (archive(("a", b"x" * 5000))[:-30], "no gzip-compressed tar"),
        (archive(("/etc/passwd", b"x")), "outside"),
        (archive(("a/../../b", b"x")), "outside"),
        (archive(device("dev")), "no file, folder or link"),
        (archive(("big", b"\0" * (3 << 20))), "unpacks to more than 2 MiB"),
        (archive(("n" * (5 << 20), b"")), "headers over"),
    ],
    ids=["text", "empty", "gzip of text", "cut", "absolute", "parent", "device", "big", "long name"],
)
def test_a_listing_refuses_what_is_no_safe_archive(tmp_path, content, said):
    bundles = Bundles(tmp_path, unpacked=2 << 20)
    digest = put(bundles, content)
    with pytest.raises(ConfigError, match=said) as refused:
        bundles.members(digest)
    assert "\n" not in str(refused.value)


def test_an_unknown_bundle_is_said(tmp_path):
    with pytest.raises(ConfigError, match="not here"):
        Bundles(tmp_path).members("0" * 64)
