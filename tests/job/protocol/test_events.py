"""Events as lines: the fast path and the slow one agree, and no text can break a line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.job.protocol import events

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
HOSTILE = ["", "\n", "\r\n", "a\u2028b\x85c", "\x00\x1b[31m", '"}\n{"seq":9', "\\", "::error::x", "é😀", "data: x\n\n"]
LINES = st.lists(TEXT | st.sampled_from(HOSTILE), max_size=6)


@given(
    lines=LINES,
    first=st.integers(1, 10**9),
    ts=st.floats(0, 4e9),
    attempt=st.integers(1, 6),
    place=st.sampled_from([("driver", None, None), ("node-1/rank-5", 1, 5)]),
)
def test_many_lines_at_once_are_the_same_bytes_as_one_by_one(lines, first, ts, attempt, place):
    source, node, rank = place
    offsets = list(range(0, 10 * len(lines), 10))
    together = events.encode_lines(first, ts, attempt, source, node, rank, lines, offsets)
    single = b"".join(
        events.encode(
            first + index,
            ts,
            attempt,
            "log",
            {"source": source, "node": node, "rank": rank, "src_off": offsets[index], "line": line},
        )
        for index, line in enumerate(lines)
    )
    assert together == single
    assert together.isascii()
    assert together.count(b"\n") == len(lines) == len(together.decode().splitlines())
    read = [json.loads(line) for line in together.splitlines()]
    assert [event["line"] for event in read] == lines
    assert [event["seq"] for event in read] == list(range(first, first + len(lines)))


def test_lines_and_offsets_of_different_length_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        events.encode_lines(1, 0.0, 1, "driver", None, None, ["a", "b"], [0])


@given(text=TEXT | st.sampled_from(HOSTILE))
def test_an_event_is_one_line_whatever_it_says(text):
    line = events.encode(3, 1.23456, 1, "status", {"status": "RUNNING", "message": text})
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    event = json.loads(line)
    assert (event["seq"], event["ts"], event["type"], event["message"]) == (3, 1.235, "status", text)


def test_half_of_a_surrogate_pair_becomes_a_question_mark_and_a_whole_one_stays():
    event = json.loads(events.encode(1, 0.0, 1, "error", {"message": "name \udcff \\ud800 😀"}))
    assert event["message"] == "name ? \\ud800 😀"


@given(text=TEXT | st.sampled_from(HOSTILE))
def test_server_sent_events_carry_the_line_and_its_number(text):
    line = events.encode(7, 0.0, 1, "log", {"line": text})
    fields = [field.partition(": ") for field in events.as_sse(line).decode().split("\n") if field]
    assert [(name, value) for name, _, value in fields][:2] == [("id", "7"), ("event", "log")]
    assert events.as_sse(line)[-2:] == b"\n\n"
    assert [json.loads(value) for name, _, value in fields if name == "data"] == [json.loads(line)]


def test_first_clients_are_told_failed_for_cancelled_and_nothing_else_changes():
    final = events.encode(9, 5.0, 2, "final", {"status": "CANCELLED", "message": "é by user"})
    told = json.loads(events.for_first_clients(final))
    assert told == json.loads(final) | {"status": "FAILED"}
    for kind, status in [("final", "SUCCEEDED"), ("final", "TIMEOUT"), ("final", "NOT_FOUND"), ("status", "CANCELLED")]:
        line = events.encode(10**12, 1.7e9, 2, kind, {"status": status})
        assert events.for_first_clients(line) is line
    log = events.encode(1, 0.0, 1, "log", {"line": '"type":"final","status":"CANCELLED"'})
    assert events.for_first_clients(log) is log


def test_what_first_clients_see_is_a_part_of_all():
    assert {"log", "status", "final", "error"} == events.FIRST_TYPES
    assert events.FIRST_TYPES < events.ALL_TYPES
    assert not events.KEEP_ALIVE.strip()
