"""Records as a client gets them: whole, in a folder of their own, and nothing outside it, whatever the archive says."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.client.api import AbsentError, Api, Patience
from corral.job.client.endpoint import Endpoint
from corral.job.client.records import Budget, fetch
from tests.job.client.wire import cut, ok, plain, serving

JOB = "rj-0123456789ab"
QUICK = Patience(first=1.0, reconnect=0.5, pause=0.01)


def archive(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            entry = tarfile.TarInfo(member[0])
            entry.size = len(member[1])
            tar.addfile(entry, io.BytesIO(member[1]))
    return raw.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def get(answers: list[bytes], to, budget: Budget | None = None) -> list[str]:
    asked: list[str] = []

    def answer(path: str, query: dict[str, str]) -> bytes:
        asked.append(path)
        return answers[min(len(asked), len(answers)) - 1]

    async def run() -> None:
        async with serving(answer) as url, Api(Endpoint(url, None, True), QUICK) as api:
            await fetch(api, JOB, to, budget=budget)

    asyncio.run(run())
    return asked


def torn(*names: str) -> bytes:
    """A whole gzip stream of an archive that ends after its last file."""
    raw = io.BytesIO(gzip.decompress(archive(*((name, b"{}") for name in names))))
    return gzip.compress(raw.read(1024 * len(names)))


GOOD = archive(("plan.json", b"{}"), ("logs/node-0/rank-0.log", b"works\n" * 1000))


def test_records_replace_what_was_there(tmp_path):
    to = tmp_path / "job"
    to.mkdir()
    (to / "old").write_text("x")
    assert get([ok(GOOD, "application/gzip")], to) == [f"GET /api/v1/rayjobs/{JOB}/records"]
    files = {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    assert files == {"plan.json": b"{}", "logs/node-0/rank-0.log": b"works\n" * 1000}
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_cut_or_refused_transfer_is_tried_again(tmp_path):
    answers = [cut(GOOD[:100]), plain("503 Busy", {"error": "busy"}), b"", ok(GOOD)]
    assert len(get(answers, tmp_path / "job")) == 4
    assert (tmp_path / "job/plan.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (cut(GOOD), InfraError, "cannot be had"),
        (plain("404 Not Found", {"error": "there are no records"}), AbsentError, "there are no records"),
        (plain("413 Too Large", {"error": "are 5 GiB"}), ConfigError, "are 5 GiB"),
        (ok(GOOD[:-20]), ConfigError, "no gzip-compressed tar archive"),
        (ok(b"<html>"), ConfigError, "no gzip-compressed tar archive"),
        (ok(torn("a", "b")), ConfigError, "end before the end of their archive"),
        (ok(gzip.compress(gzip.decompress(torn("a")) + b"x" * 512)), ConfigError, "end before the end"),
        (ok(archive(("../out", b"x"))), ConfigError, "no plain file"),
        (ok(archive(("/tmp/corral-out", b"x"))), ConfigError, "no plain file"),
        (ok(archive(("a/../../out", b"x"))), ConfigError, "no plain file"),
        (ok(archive(special("out", tarfile.SYMTYPE, "/etc/passwd"))), ConfigError, "no plain file"),
        (ok(archive(("a", b"x"), special("out", tarfile.LNKTYPE, "a"))), ConfigError, "no plain file"),
        (ok(archive(special("out", tarfile.FIFOTYPE))), ConfigError, "no plain file"),
        (ok(archive(("a", b"x"), ("a", b"y"))), ConfigError, "twice: a"),
        (ok(archive(("a", b"x"), ("a/b", b"y"))), ConfigError, "twice: a"),
        (ok(archive(("big", bytes(3 << 20)))), ConfigError, "over 2 MiB or 10 files"),
        (ok(archive(*((f"f{i}", b"") for i in range(11)))), ConfigError, "over 2 MiB or 10 files"),
        (ok(gzip.compress(bytes(64 << 20))), None, ""),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path, answer, error, said):
    """The last: zeros are the end of an archive, however many there are."""
    to = tmp_path / "inside/job"
    if error is None:
        get([answer], to, Budget(2 << 20, 10))
        assert list(to.iterdir()) == []
        return
    with pytest.raises(error, match=said) as caught:
        get([answer], to, Budget(2 << 20, 10))
    assert "\n" not in str(caught.value)
    assert not to.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["inside"] or not list(tmp_path.iterdir())
    assert not list((tmp_path / "inside").glob("*"))


def test_headers_that_would_fill_the_memory_are_refused(tmp_path):
    entry = tarfile.TarInfo("a")
    entry.pax_headers = {"comment": "x" * (8 << 20)}
    with pytest.raises(ConfigError, match="headers over 4 MiB"):
        get([ok(archive(entry))], tmp_path / "job")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InfraError, match="cannot keep the records"):
        get([ok(GOOD)], tmp_path / "file/job")
