"""Cutting bytes into lines, last lines, and the live stream of what ranks write."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.local_cluster import LocalCluster
from corral.workers.log_pump import LogPump
from corral.workers.logs import LONGEST_LINE, LineCutter, last_lines, rank_log, read_new
from corral.workers.ray_launcher import RayLauncher
from tests.workers.clusters import topology, until

EVERY_WAY = ["print", "fd 1", "shell", "shell error", "C", "stderr"]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    cutter = LineCutter()
    got = [line for start, end in pairwise(edges) for line in cutter.feed(data[start:end])]
    got += cutter.flush()
    whole = data.split(b"\n")
    expected = whole if whole[-1] else whole[:-1]
    assert got == [line.removesuffix(b"\r").decode("utf-8", "replace") for line in expected]


def test_an_endless_line_is_handed_on_in_pieces() -> None:
    cutter = LineCutter()
    got = cutter.feed(b"x" * (LONGEST_LINE * 2 + 5)) + cutter.flush()
    assert [len(line) for line in got] == [LONGEST_LINE, LONGEST_LINE, 5]


def test_last_lines_skip_blanks_and_fit_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path) == "(no such file here)"
    path.write_bytes(b"")
    assert last_lines(path) == "(empty)"
    path.write_bytes(b"".join(b"line %d\n\n" % number for number in range(9)) + b"bad \xff")
    assert last_lines(path, 3) == "line 7 / line 8 / bad \ufffd"


def test_a_crash_is_quoted_from_its_innermost_call(tmp_path: Path) -> None:
    path = tmp_path / "log"
    stack = "".join(f'  File "f{depth}.py", line 1 in f\n' for depth in range(20))
    path.write_text("before\nFatal Python error: Aborted\n\nCurrent thread (most recent call first):\n" + stack)
    assert last_lines(path, 3) == (
        'Fatal Python error: Aborted / Current thread (most recent call first): / File "f0.py", line 1 in f / '
        'File "f1.py", line 1 in f'
    )


def test_the_pump_delivers_everything_written_before_it_is_closed(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    log = rank_log(tmp_path, 1, 5)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"of an earlier run\n")
    skip = log.stat().st_size
    pump = LogPump(
        lambda node, offsets: read_new(tmp_path, node, offsets), [{}, {5: skip}], lambda *line: seen.append(line)
    )
    with log.open("ab") as file:
        file.write(b"first\nsec")
        file.flush()
        until(lambda: seen == [(1, 5, "first")])
        file.write(b"ond\nno line end")
    pump.close(30)
    assert seen == [(1, 5, "first"), (1, 5, "second"), (1, 5, "no line end")]


def test_a_failed_read_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """A read that takes only a byte at a time, and sometimes nothing, as from a node that answers late."""
    seen: list[str] = []
    data, turn = b"one\ntwo\nthree\n", iter(range(1000))

    def read(node: int, offsets: dict[int, int]) -> dict[int, bytes]:
        return {} if next(turn) % 7 == 1 else {0: data[offsets[0] : offsets[0] + 1]} if offsets[0] < len(data) else {}

    pump = LogPump(read, [{0: 0}], lambda node, rank, line: seen.append(line))
    until(lambda: len(seen) == 3)
    pump.close(30)
    assert seen == ["one", "two", "three"]


def test_output_of_every_kind_is_kept_in_order_and_streamed_once(cluster: LocalCluster, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    launcher = RayLauncher(
        topology(2, 2, cluster.address),
        "tests.workers.toy:Toy",
        (str(tmp_path),),
        tmp_path,
        preload=(),
        sink=lambda *line: seen.append(line),
    )
    try:
        for turn in range(3):
            launcher.call("write", [(f"turn {turn} of rank {rank}:",) for rank in range(4)])
        until(lambda: len(seen) == 3 * 4 * len(EVERY_WAY))  # live, before the end
        launcher.call("write_bytes", [(b"bad \xff byte\nno line end",)] * 4)
    finally:
        launcher.close()
    for rank in range(4):
        expected = [f"turn {turn} of rank {rank}: {way}" for turn in range(3) for way in EVERY_WAY]
        expected += ["bad \ufffd byte", "no line end"]
        assert [line for node, number, line in seen if (node, number) == (rank // 2, rank)] == expected
        text = (tmp_path / f"logs/node-{rank // 2}/rank-{rank}.log").read_bytes().decode("utf-8", "replace")
        assert text == "\n".join(expected)
    assert len(seen) == 4 * (3 * len(EVERY_WAY) + 2)


def test_the_default_sink_prefixes_node_and_rank(cluster: LocalCluster, tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    launcher = RayLauncher(
        topology(1, 1, cluster.address), "tests.workers.toy:Toy", (str(tmp_path),), tmp_path, preload=()
    )
    launcher.call("write", [("hello",)])
    launcher.close()
    assert re.findall(r"^\[node-0 rank-0\] hello (.*)$", capfd.readouterr().out, re.MULTILINE) == EVERY_WAY
