"""What is taken from the files of ranks, whatever is in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from corral.job.agent.progress import is_one_host, standing


def write(run: Path, rank: int, /, text: str | None = None, **fields: object) -> None:
    folder = run / "progress"
    folder.mkdir(exist_ok=True)
    record = {"rank": rank, "node": 0, "calls": 5, "state": "idle", "method": "update", "time": 1.0} | fields
    (folder / f"rank-{rank}.json").write_text(json.dumps(record) if text is None else text)


def test_no_progress_is_none_at_all(tmp_path: Path):
    found = standing(tmp_path, same_host=True)
    assert (found.ranks, found.total, found.suspects) == ([], None, [])


def test_what_is_no_progress_is_left_out(tmp_path: Path):
    for number, text in enumerate(["", "{", "[1]", "null", '{"rank": 1}', "[" * 9000, '"\\ud800"', "\ufeff{}"]):
        write(tmp_path, number, text)
    broken = [
        {"calls": -1},
        {"calls": 10**30},
        {"time": float("nan")},
        {"rank": -1},
        {"node": 10**6},
        {"state": "\ud800"},
    ]
    for number, fields in enumerate(broken, 20):
        write(tmp_path, number, **fields)
    os.mkfifo(tmp_path / "progress" / "rank-50.json")
    write(tmp_path, 60, more="than asked for", method="m" * 5000, pid="no pid")
    found = standing(tmp_path, same_host=True)
    assert [(rank.rank, rank.calls, len(rank.method)) for rank in found.ranks] == [(60, 5, 64)]
    assert (found.total, found.suspects) == (5, [])


def test_suspects_are_those_that_are_gone_and_those_behind(tmp_path: Path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    write(tmp_path, 0, pid=os.getpid(), calls=7)
    write(tmp_path, 1, pid=child, calls=7)  # a zombie until it is waited for
    write(tmp_path, 2, pid=2**22 + 1, calls=6, method="", state="running")
    write(tmp_path, 10, calls=6)
    try:
        found = standing(tmp_path, same_host=True)
        assert found.total == 26
        assert [rank.rank for rank in found.ranks] == [0, 1, 2, 10]
        assert found.suspects == [
            f"node-0 rank 1 (pid {child}) is gone, in update",
            f"node-0 rank 2 (pid {2**22 + 1}) is gone, before any call",
            "node-0 rank 2 is at call 6 of 7, running before any call",
            "node-0 rank 10 is at call 6 of 7, idle in update",
        ]
        assert standing(tmp_path, same_host=False).suspects == found.suspects[2:]
    finally:
        os.waitpid(child, 0)


def test_which_pids_are_of_this_machine():
    assert is_one_host({})
    assert is_one_host({"RAY_ADDRESS": "127.0.0.2:6379"})
    assert not is_one_host({"RAY_ADDRESS": "10.0.0.1:6379"})
