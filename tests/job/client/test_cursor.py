"""Every event once and in order, however the bytes of a stream are cut, repeated or damaged."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.job.client.cursor import MAX_LINE, Cursor
from tests.job.client.wire import after, recorded

EVENTS = recorded(14, ranks=2)
STREAM = b"\n" + b"".join(EVENTS[:7]) + b"\n\n" + b"".join(EVENTS[7:])
SEQS = list(range(1, len(EVENTS) + 1))


def resumed(pieces: list[bytes], cursor: Cursor) -> list[int]:
    """Feed one connection after the other, each answered from the cursor, cut after the given number of bytes."""
    return [event["seq"] for piece in pieces for event in cursor.feed(piece)]


def test_cut_at_every_byte_and_resumed():
    assert len(STREAM) > 1500
    for position in range(len(STREAM) + 1):
        cursor = Cursor()
        seqs = resumed([STREAM[:position]], cursor)
        if cursor.final is None:
            cursor.connected()
            seqs += resumed([after(EVENTS, cursor.seq)], cursor)
        assert seqs == SEQS, position
        assert cursor.final is not None


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=80, deadline=None)
def test_any_pieces_and_any_cuts(marks, lengths):
    cursor = Cursor()
    seqs: list[int] = []
    for length in lengths:
        cursor.connected()
        seqs += resumed([after(EVENTS, cursor.seq)[:length]], cursor)
    cursor.connected()
    rest = after(EVENTS, cursor.seq)
    bounds = [0, *sorted(mark % (len(rest) + 1) for mark in marks), len(rest)]
    seqs += resumed([rest[a:b] for a, b in itertools.pairwise(bounds)], cursor)
    assert seqs == SEQS


def test_a_server_that_repeats_everything():
    cursor = Cursor()
    seqs = resumed([STREAM[:900]], cursor)
    cursor.connected()
    assert seqs + resumed([STREAM], cursor) == SEQS


def test_nothing_counts_before_its_line_break_came():
    cursor = Cursor()
    whole = b"".join(EVENTS).removesuffix(b"\n")
    assert resumed([whole], cursor) == SEQS[:-1]
    assert cursor.final is None
    assert resumed([b"\n"], cursor) == SEQS[-1:]


def test_nothing_after_final():
    cursor = Cursor()
    extra = EVENTS[2].replace(b'"seq":3,', b'"seq":18,')
    assert resumed([STREAM + extra, extra], cursor) == SEQS


@pytest.mark.parametrize(
    "bad",
    [b"{", b"\xff\xfe", b"[]", b"7", b'{"seq":"4","type":"log"}', b'{"seq":4}', b'{"seq":true,"type":"log"}',
     b'{"type":"final","status":"SUCCEEDED"}', b"[" * 100_000, b'{"seq":4.0,"type":"final"}', b"<html>"],
)  # fmt: skip
def test_damage_ends_the_connection_not_the_job(bad):
    cursor = Cursor()
    assert resumed([b"".join(EVENTS[:3]) + bad + b"\n" + b"".join(EVENTS[3:])], cursor) == SEQS[:3]
    assert cursor.broken is not None
    assert cursor.final is None
    cursor.connected()
    assert resumed([after(EVENTS, 3)], cursor) == SEQS[3:]


def test_a_jump_breaks_the_connection_unless_it_is_accepted():
    stream = b"".join(EVENTS[:4] + EVENTS[6:])
    cursor = Cursor()
    assert resumed([stream], cursor) == SEQS[:4]
    assert (cursor.jump, cursor.broken) == (7, "event 7 came after event 4")
    cursor.accept_jump()
    cursor.connected()
    assert resumed([after(EVENTS, cursor.seq)], cursor) == SEQS[6:]
    filtered = Cursor(gapless=False)
    assert resumed([stream], filtered) == [*SEQS[:4], *SEQS[6:]]


def test_a_line_without_end():
    cursor = Cursor()
    assert resumed([b"x" * MAX_LINE, b"xx"], cursor) == []
    assert cursor.broken is not None


def test_starts_after_an_event():
    assert resumed([STREAM], Cursor(after_seq=9)) == SEQS[9:]


def test_types_that_came_later_pass():
    event = json.dumps({"seq": 1, "type": "hologram"}).encode() + b"\n"
    assert resumed([event], Cursor()) == [1]
