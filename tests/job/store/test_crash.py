"""A service that dies in the middle of a write, and a disk that forgets: nothing twice, nothing missing unsaid."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from corral.job.core.clock import Clock
from corral.job.store.reading import LOST
from corral.job.store.store import Store
from tests.job.store.jobs import JOB, batch, chunk, finish, is_gap_free, lines_of, new_job, read_all

SOURCES = ("driver", "node-0/rank-0", "node-1/rank-5")
ROLL = 20_000


def line(source: str, n: int) -> str:
    return f"{source} line {n} {'·' * (n % 40)}"


def write_on(url: str | None, data_dir: Path, turns: int) -> None:
    """What an agent does: go on from the watermarks, and send more for ever (or `turns` times)."""
    store = Store(url, data_dir, Clock(), roll=ROLL)
    marks = store.watermarks(JOB, 1)
    stored = dict.fromkeys(SOURCES, 0)
    for source in SOURCES:
        at = 0
        while at < marks.get(source, 0):
            at += len(line(source, stored[source]).encode()) + 1
            stored[source] += 1
        assert at == marks.get(source, 0), "a watermark is the end of a line"
    while turns:
        turns -= 1
        parts = []
        for source in random.sample(SOURCES, random.randint(1, 3)):
            count = random.randint(1, 40)
            lines = [line(source, n) for n in range(stored[source], stored[source] + count)]
            parts.append(chunk(source, store.watermarks(JOB, 1).get(source, 0), lines))
            stored[source] += count
        store.append_logs(JOB, batch(*parts))
        if random.random() < 0.2:
            store.append(JOB, "phase", {"message": "on"}, 1)
    store.close()


def check(store: Store, data_dir: Path) -> int:
    """Everything that is stored is in order, once, and fits the watermarks. Returns the number of lines."""
    told = read_all(store)
    assert is_gap_free(told)
    marks = store.watermarks(JOB, 1)
    total = 0
    for source in SOURCES:
        lines = lines_of(told, source)
        assert lines == [line(source, n) for n in range(len(lines))]
        assert sum(len(text.encode()) + 1 for text in lines) == marks.get(source, 0)
        total += len(lines)
    logs = store.read(JOB, 0, types=frozenset({"log"}), max_bytes=1 << 30)
    assert _content(data_dir / "jobs" / JOB / "segments") == logs.data, "and nothing else is in the files"
    return total


def kill_and_check(url: str | None, data_dir: Path, rounds: int) -> None:
    store = Store(url, data_dir, Clock())
    new_job(store)
    store.close()
    fork = multiprocessing.get_context("fork")
    before = 0
    for _ in range(rounds):
        writer = fork.Process(target=write_on, args=(url, data_dir, -1))
        writer.start()
        segments = data_dir / "jobs" / JOB / "segments"
        size = _size(segments)
        deadline = time.monotonic() + 30
        while _size(segments) <= size and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))  # the fault: anywhere in a write
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        store = Store(url, data_dir, Clock(), roll=ROLL)
        after = check(store, data_dir)
        assert after >= before
        before = after
        store.close()
    write_on(url, data_dir, turns=20)
    store = Store(url, data_dir, Clock(), roll=ROLL)
    assert check(store, data_dir) > before
    finish(store, store.get(JOB))
    check(store, data_dir)
    store.close()


def test_kill_9_of_the_writer(url, data_dir):
    kill_and_check(url, data_dir, rounds=6)


@pytest.mark.slow
def test_kill_9_of_the_writer_again_and_again(url, data_dir):
    kill_and_check(url, data_dir, rounds=150)


def test_bytes_that_were_never_indexed_are_cut_off_on_open(store, data_dir, reopen):
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["a", "b"])))
    segment = _segment(data_dir)
    whole = segment.read_bytes()
    with segment.open("ab") as file:
        file.write(b'{"seq":5,"type":"log","half of a li')
    store = reopen()
    assert segment.read_bytes() == whole
    store.append_logs(JOB, batch(chunk("driver", 4, ["c"])))
    assert lines_of(read_all(store), "driver") == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["short", "middle of a line", "zeros", "gone"])
def test_what_the_disk_lost_is_said_and_every_seq_is_there(store, data_dir, reopen, damage):
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["a", "b", "c"]), chunk("node-0/rank-0", 0, ["d", "e"])))
    before = read_all(store)
    segment = _segment(data_dir)
    whole = segment.read_bytes().splitlines(keepends=True)
    kept = 0 if damage == "gone" else 2
    if damage == "gone":
        segment.unlink()
    elif damage == "zeros":
        segment.write_bytes(b"".join(whole[:2]) + b"\0" * len(b"".join(whole[2:])))
    else:
        segment.write_bytes(b"".join(whole[:2]) + (whole[2][:20] if damage == "middle of a line" else b""))
    store = reopen()
    told = read_all(store)
    assert is_gap_free(told)
    assert told[: 2 + kept] == before[: 2 + kept]
    for event, was in zip(told[2 + kept : 7], before[2 + kept :], strict=True):
        assert event["line"] == LOST
        assert {name: event[name] for name in ("seq", "type", "source", "rank", "node", "attempt")} == {
            name: was[name] for name in ("seq", "type", "source", "rank", "node", "attempt")
        }
    if damage != "zeros":
        assert [event["type"] for event in told[7:]] == ["warning"]
        assert "lost by the service's disk" in told[7]["message"]
    store.append_logs(JOB, batch(chunk("driver", 6, ["after"])))
    store = reopen()
    again = read_all(store)
    assert again[: len(told)] == told
    assert is_gap_free(again)
    assert lines_of(again, "driver")[-1] == "after"
    for after in range(len(again)):
        assert read_all(store, after_seq=after, max_bytes=300) == again[after:]


def test_a_job_that_is_over_can_be_read_when_its_segments_are_gone(store, data_dir, reopen):
    job = new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["a", "b", "c"])))
    finish(store, job)
    _segment(data_dir).unlink()
    told = read_all(reopen())
    assert is_gap_free(told)
    assert lines_of(told, "driver") == [LOST] * 3
    assert told[-1]["type"] == "final"


def _segment(data_dir: Path) -> Path:
    (segment,) = (data_dir / "jobs" / JOB / "segments").glob("*.ndjson")
    return segment


def _content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*")))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*")) + len(list(folder.glob("*")))
