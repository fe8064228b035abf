"""Bytes of a job's output to lines: what is shown, at which offsets, and that neither depends on how bytes arrive."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.job.agent.lines import LONGEST, LineReader, Redactor

SECRET = "s3cr3t-t0ken"


def redact(text: str) -> str:
    return text.replace(SECRET, "***")


def read(data: bytes, sizes: list[int] | None = None, redactor: Redactor | None = redact, start: int = 0):
    """All lines and offsets of `data` fed in chunks of the given sizes, in turn."""
    reader = LineReader(start, redactor)
    lines, offsets, at, turn = [], [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)] if sizes else len(data)
        new = reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
        lines += new[0]
        offsets += new[1]
    last = reader.flush()
    assert reader.end == start + len(data)
    return lines + last[0], offsets + last[1]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"plain\n", ["plain"]),
        (b"no end", ["no end"]),
        (b"\n\n", ["", ""]),
        (b"dos\r\nunix\n", ["dos", "unix"]),
        (b"a\tb\n", ["a\tb"]),
        (b"nul\x00 bell\x07 back\x08 del\x7f\n", ["nul bell back del"]),
        ("c1\x85\x80 kept: é 中 \u2028\n".encode(), ["c1 kept: é 中 \u2028"]),
        (b"\xff bad \xc3\n", ["\ufffd bad \ufffd"]),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07x \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\ \x1b(Bz \x9b\n", None),
        (b"half \x1b[31", ["half [31"]),
        (b"open \x1b]0;title stays\n", ["open ]0;title stays"]),
        (b" 10%|#  |\r 50%|## |\r100%|###|\n", ["100%|###|"]),
        (b" 10%|#  |\r 99%|## |\r         \r\n", [" 99%|## |"]),
        (b"key=s3cr3t-t0ken.\n", ["key=***."]),
        (b"key=s3cr\x1b[1m3t-t0\x00ken.\n", ["key=***."]),
    ],
)
def test_what_is_shown(data: bytes, expected: list[str] | None):
    lines, offsets = read(data)
    assert lines == (expected or ["red x link z \ufffd"])
    assert offsets[0] == 0


def test_offsets_are_bytes_of_the_file():
    lines, offsets = read("é\n\x1b[31mb\x1b[0m\r\n\ncd".encode(), start=100)
    assert list(zip(lines, offsets, strict=True)) == [("é", 100), ("b", 103), ("", 115), ("cd", 116)]


def test_a_long_line_comes_out_in_pieces_that_lose_nothing():
    text = "".join(chr(0x4E00 + i % 5000) for i in range(200_000)) + "x" * 100_000
    lines, offsets = read(text.encode() + b"\nnext\n", [50_001])
    assert "".join(lines[:-1]) == text
    assert lines[-1] == "next"
    assert max(len(line.encode()) for line in lines) <= LONGEST
    ends = [*offsets[1:-1], len(text.encode())]
    assert all(end - start == len(line.encode()) for start, end, line in zip(offsets, ends, lines, strict=False))


def test_no_cut_goes_through_a_secret_or_a_colour():
    for shift in range(len(SECRET) + 12):
        text = "x" * (LONGEST - shift) + SECRET + "\x1b[38;5;12m" + "y" * LONGEST
        lines, _ = read(text.encode(), [10_007])
        shown = "".join(lines)
        assert shown == text.replace(SECRET, "***").replace("\x1b[38;5;12m", ""), shift


def test_a_progress_bar_without_line_ends_shows_whole_states():
    bar = b"".join(b"%3d%%|%s|\r" % (i % 100, b"#" * 100) for i in range(3000))
    lines, offsets = read(bar)
    assert lines
    assert all(re.fullmatch(r" ?\d+%\|#{100}\|", line.strip()) for line in lines)
    assert offsets == sorted(set(offsets))


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\x1b[31m", b"\x1b]0;", b"\x07", b"\x00", "é中🙂".encode()]),
        st.just(SECRET.encode()),
        st.integers(LONGEST - 20, LONGEST + 5000).map(lambda size: b"z" * size),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(PIECES.map(b"".join), st.lists(st.integers(1, 70_000), min_size=1, max_size=4))
def test_chunk_sizes_change_nothing_and_lines_are_clean(data: bytes, sizes: list[int]):
    lines, offsets = whole = read(data)
    assert read(data, [max(size, len(data) // 50 + 1) for size in sizes]) == whole
    assert offsets == sorted(set(offsets))
    assert len(lines) >= data.count(b"\n")
    for line in lines:
        assert SECRET not in line
        assert all(char == "\t" or unicodedata.category(char) != "Cc" for char in line)
        line.encode("utf-8")


@settings(max_examples=60, deadline=None)
@given(PIECES.map(b"".join), st.data())
def test_another_reader_goes_on_where_one_ended(data: bytes, draw: st.DataObject):
    first, second = LineReader(0, redact), None
    lines, offsets = first.feed(data[: draw.draw(st.integers(0, len(data)))])
    second = LineReader(first.end, redact)
    for more in (second.feed(data[first.end :]), second.flush()):
        lines, offsets = lines + more[0], offsets + more[1]
    assert (lines, offsets) == read(data)
