"""Log lines: stored once, numbered without gaps, read back byte for byte in any slices."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from corral.errors import ConfigError
from corral.job.protocol.agent import LogChunk
from corral.job.protocol.events import ALL_TYPES, FIRST_TYPES
from corral.job.store import writing
from corral.job.store.store import Misfit
from tests.job.store.jobs import JOB, batch, chunk, finish, is_gap_free, lines_of, new_job, read_all, run

WEIRD = [
    "plain",
    "",
    "nul \x00 and \x1b[31mescape\x1b[0m",
    "naïve 漢字 😀 \u2028 \u0085 \ufffe",
    '"quotes" \\ backslash {"seq":1,"type":"final"}',
    "::error::not ours",
    "x" * 100_000,
]


def test_any_text_comes_back_as_it_was_sent(store, reopen):
    new_job(store)
    sent = chunk("node-1/rank-7", 0, WEIRD)
    assert store.append_logs(JOB, batch(sent)) == {"node-1/rank-7": sent.end}
    store = reopen()
    store.append(JOB, "phase", {"message": WEIRD[3], "nested": {"deep": [WEIRD[2]]}}, 1)
    told = read_all(store)
    assert is_gap_free(told)
    assert lines_of(told, "node-1/rank-7") == WEIRD
    assert [event["src_off"] for event in told if event["type"] == "log"] == sent.offsets
    assert told[2].items() >= {"node": 1, "rank": 7, "attempt": 1, "source": "node-1/rank-7"}.items()
    assert (told[-1]["message"], told[-1]["nested"]) == (WEIRD[3], {"deep": [WEIRD[2]]})


def test_a_field_that_is_no_utf8_does_not_stop_an_event(store):
    new_job(store)
    seq = store.append(JOB, "warning", {"message": "file \udcff"}, 1)
    assert read_all(store)[-1].items() >= {"seq": seq, "message": "file ?"}.items()


def test_a_chunk_is_stored_once_and_only_where_the_last_one_ended(store):
    new_job(store)
    first, second = chunk("driver", 0, ["a", "b"]), chunk("driver", 4, ["c"])
    other = chunk("node-0/rank-0", 0, ["r"])
    assert store.append_logs(JOB, batch(first, other)) == {"driver": 4, "node-0/rank-0": 2}
    before = read_all(store)
    assert store.append_logs(JOB, batch(first, other)) == {"driver": 4, "node-0/rank-0": 2}
    for misfit in (chunk("driver", 5, ["c"]), chunk("driver", 2, ["b", "c"]), chunk("node-0/rank-1", 1, ["x"])):
        fits = chunk("node-0/rank-0", 2, ["not stored either"])
        with pytest.raises(Misfit) as refused:
            store.append_logs(JOB, batch(fits, misfit))
        assert refused.value.watermarks == {"driver": 4, "node-0/rank-0": 2}
    assert read_all(store) == before
    assert store.append_logs(JOB, batch(first, second)) == {"driver": 6, "node-0/rank-0": 2}
    assert lines_of(read_all(store), "driver") == ["a", "b", "c"]
    assert store.watermarks(JOB, 1) == {"driver": 6, "node-0/rank-0": 2}
    assert store.watermarks(JOB, 2) == {}


def test_attempts_have_watermarks_of_their_own_and_one_that_never_was_is_refused(store):
    job = run(store, new_job(store))
    store.append_logs(JOB, batch(chunk("driver", 0, ["first"])))
    with pytest.raises(ConfigError, match="none with number 2"):
        store.append_logs(JOB, batch(chunk("driver", 0, ["x"]), attempt=2))
    assert job.attempt == 1
    assert store.watermarks(JOB, 1) == {"driver": 6}


def test_a_chunk_without_lines_moves_its_watermark(store):
    new_job(store)
    store.append_logs(JOB, batch(LogChunk(source="driver", start=0, end=10, lines=[], offsets=[])))
    assert store.append_logs(JOB, batch(chunk("driver", 10, ["x"]))) == {"driver": 12}
    assert lines_of(read_all(store), "driver") == ["x"]


def test_types_and_ranks_choose_and_the_cursor_passes_what_is_left_out(store):
    new_job(store)
    for n in range(3):
        sources = ("driver", "node-0/rank-0", "node-0/rank-1")
        store.append_logs(JOB, batch(*(chunk(source, 8 * n, [f"line {n}{s}"]) for s, source in enumerate(sources))))
        store.append(JOB, "phase", {"message": f"phase {n}"}, 1)
    everything = read_all(store)
    assert is_gap_free(everything)
    last = everything[-1]["seq"]
    assert read_all(store, types=FIRST_TYPES) == [event for event in everything if event["type"] != "phase"]
    assert read_all(store, types=frozenset({"phase"})) == [event for event in everything if event["type"] == "phase"]
    for ranks in (frozenset({0}), frozenset({0, 1}), frozenset({9}), frozenset()):
        kept = [event for event in everything if event["type"] != "log" or event["rank"] in ranks]
        assert read_all(store, ranks=ranks) == kept
    assert store.read(JOB, 0, types=frozenset({"final"})).next_seq == last
    assert store.read(JOB, last + 5, types=ALL_TYPES).next_seq == last + 5


@pytest.mark.parametrize("piece", [200, 256 << 10])
def test_every_cursor_and_page_size_gives_the_rest_exactly(store, monkeypatch, piece):
    monkeypatch.setattr(writing, "PIECE", piece)
    job = new_job(store)
    lines = [f"line {n} {'x' * (n * 7 % 150)}" for n in range(40)]
    store.append_logs(JOB, batch(chunk("driver", 0, lines)))
    store.append(JOB, "phase", {"message": "p"}, 1)
    store.append_logs(JOB, batch(chunk("node-0/rank-0", 0, lines[:20])))
    finish(store, job)
    everything = store.read(JOB, 0, types=ALL_TYPES, max_bytes=1 << 20)
    assert everything.done
    assert is_gap_free([json.loads(line) for line in everything.data.splitlines()])
    whole = everything.data.splitlines(keepends=True)
    for max_bytes in (1, 150, 700, 5000):
        for after in range(len(whole) + 1):
            page = store.read(JOB, after, types=ALL_TYPES, max_bytes=max_bytes)
            count = page.next_seq - after
            assert page.data == b"".join(whole[after : after + count])
            assert len(page.data) <= max_bytes or count == 1
            assert count >= 1 or after == len(whole)
            assert page.done == (page.next_seq == len(whole))


def test_segments_roll_and_files_are_closed_at_the_end(reopen, data_dir):
    store = reopen(roll=5000)
    job = new_job(store)
    lines = [f"line {n}" for n in range(300)]
    at = 0
    for start in range(0, 300, 10):
        part = chunk("driver", at, lines[start : start + 10])
        at = part.end
        store.append_logs(JOB, batch(part))
    folder = data_dir / "jobs" / JOB / "segments"
    assert len(_open_under(folder)) == 1
    finish(store, job)
    assert _open_under(folder) == []
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 3
    assert names[0] == "000000.ndjson"
    told = read_all(reopen(roll=5000))
    assert is_gap_free(told)
    assert lines_of(told, "driver") == lines
    stored = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert stored.count(b"\n") == 300
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_above_the_limit_one_warning_an_attempt_and_watermarks_go_on(reopen):
    store = reopen(log_bytes=3000)
    job = run(store, new_job(store))
    at = 0
    for n in range(30):
        part = chunk("driver", at, [f"line {n} {'x' * 50}"])
        at = part.end
        assert store.append_logs(JOB, batch(part)) == {"driver": at}
    store = reopen(log_bytes=3000)
    assert store.append_logs(JOB, batch(chunk("node-0/rank-0", 0, ["never stored"]))) == {
        "driver": at,
        "node-0/rank-0": 13,
    }
    told = read_all(store)
    assert is_gap_free(told)
    kept = lines_of(told, "driver")
    assert 10 < len(kept) < 30
    assert kept == [f"line {n} {'x' * 50}" for n in range(len(kept))]
    (warning,) = [event for event in told if event["type"] == "warning"]
    assert "3000 bytes" in warning["message"]
    assert lines_of(told, "node-0/rank-0") == []
    finish(store, store.get(JOB))
    assert is_gap_free(read_all(store))
    assert job.attempt == 1


def test_two_writers_and_a_reader_at_once(store):
    job = new_job(store)
    count, errors = 60, []

    def write(source: str) -> None:
        at = 0
        for n in range(count):
            part = chunk(source, at, [f"{source} line {n}-{i}" for i in range(5)])
            at = part.end
            store.append_logs(JOB, batch(part))
            if n % 10 == 0:
                store.append(JOB, "phase", {"message": f"{source} {n}"}, 1)

    def follow() -> None:
        cursor, seen = 0, []
        while True:
            page = store.read(JOB, cursor, types=ALL_TYPES, max_bytes=2000)
            seen += [json.loads(line)["seq"] for line in page.data.splitlines()]
            if seen != list(range(1, len(seen) + 1)) or page.next_seq != len(seen):
                errors.append(seen)
                return
            cursor = page.next_seq
            if page.done:
                return

    reader = threading.Thread(target=follow)
    writers = [threading.Thread(target=write, args=(f"node-0/rank-{rank}",)) for rank in range(2)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    finish(store, job)
    reader.join()
    assert errors == []
    told = read_all(store)
    for rank in range(2):
        source = f"node-0/rank-{rank}"
        assert lines_of(told, source) == [f"{source} line {n}-{i}" for n in range(count) for i in range(5)]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(told))


@pytest.mark.parametrize("url", [None])  # the fault is planted in SQLite
def test_a_write_that_the_database_refuses_leaves_nothing(reopen, data_dir):
    store = reopen()
    new_job(store)
    store.append_logs(JOB, batch(chunk("driver", 0, ["a"])))
    with sqlite3.connect(data_dir / "corral.db") as planted:
        planted.execute("CREATE TRIGGER refuse BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ABORT, 'planted'); END")
    with pytest.raises(RuntimeError, match="planted"):
        store.append_logs(JOB, batch(chunk("driver", 2, ["b" * 500])))
    with sqlite3.connect(data_dir / "corral.db") as planted:
        planted.execute("DROP TRIGGER refuse")
    assert store.watermarks(JOB, 1) == {"driver": 2}
    store.append_logs(JOB, batch(chunk("driver", 2, ["c"])))
    told = read_all(store)
    assert is_gap_free(told)
    assert lines_of(told, "driver") == ["a", "c"]
    assert lines_of(read_all(reopen()), "driver") == ["a", "c"]


def _open_under(folder: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found
