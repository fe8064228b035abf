"""The line that tells why a job failed, among all lines of all ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from corral.job.core.first_error import LONGEST, OUTLIVED, FirstError, first_error


def driver(*lines: str):
    return first_error(("driver", None, None, line, 1.0) for line in lines)


def traceback(error: str, prefix: str = "") -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()", error]
    return [prefix + line for line in lines]


PATHS = "paths: expected /data there, found No such file or directory; name a path that every node has"
CHAIN = [
    *traceback("KeyError: 'lr'"),
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *traceback("ValueError: no learning rate"),
]


@pytest.mark.parametrize(
    ("lines", "text", "node", "rank"),
    [
        (traceback("ValueError: bad"), "ValueError: bad", None, None),
        (traceback("KeyboardInterrupt"), "KeyboardInterrupt", None, None),
        (traceback("my.pkg.Error: a: b"), "my.pkg.Error: a: b", None, None),
        (traceback("ValueError: bad", "[rank3]: "), "ValueError: bad", None, 3),
        (traceback("ValueError: bad", "[node-1 rank-5] "), "ValueError: bad", 1, 5),
        (traceback("ValueError: bad", "\x1b[36m(Actor pid=7, ip=10.0.0.1)\x1b[0m "), "ValueError: bad", None, None),
        (CHAIN, "ValueError: no learning rate", None, None),
        (
            traceback(
                "corral.x.WorkerError: update failed on node-1 rank 5: OSError: a; b; the traceback is in logs/x"
            ),
            "OSError: a; b",
            1,
            5,
        ),
        (
            ["error: data.train_files is missing (node-0 rank 2)"],
            "error: data.train_files is missing (node-0 rank 2)",
            0,
            2,
        ),
        (["train.py: error: unrecognized arguments: --x"], "train.py: error: unrecognized arguments: --x", None, None),
        (["error: worker node-1 rank 5 (pid 7) died: signal 9 (SIGKILL)"], None, 1, 5),
        (["error: node-1 (node-1, 10.0.0.1, Ray node ab) was lost during update: gone"], None, 1, None),
        (
            ["Fatal Python error: Segmentation fault", "", "Current thread 0x1 (most recent call first):"],
            None,
            None,
            None,
        ),
        (["SyntaxError: '(' was never closed"], None, None, None),
        ([f"FAILED  {PATHS}", "ok  nodes      1 node"], PATHS, None, None),
        (
            ["FAILED  packages on node-1: expected torch 2.13, found torch 2.12; install it", f"FAILED  {PATHS}"],
            "packages: expected torch 2.13, found torch 2.12; install it",
            1,
            None,
        ),
        (["FAILED  all_reduce on rank 5 on node-1: expected 6, found 5"], "all_reduce: expected 6, found 5", 1, 5),
        (
            ["FAILED  connect on node-1 to node-0: expected an answer, found none"],
            "connect on node-1 to node-0: expected an answer, found none",
            1,
            None,
        ),
        (["thread 'main' panicked at src/a.rs:3:5:"], None, None, None),
        (["terminate called after throwing an instance of 'std::bad_alloc'"], None, None, None),
        (
            ["RuntimeError ahead: not one", "cp: write error: No space left on device"],
            "cp: write error: No space left on device",
            None,
            None,
        ),
        (["[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"], None, None, None),
        (["[ERROR] RT: EI0006: getting socket times out"], None, None, None),
    ],
)
def test_one_error_is_found_with_its_place(lines, text, node, rank):
    found = driver("starting", *lines, "ending")
    assert found is not None
    assert found.text == (lines[0] if text is None else text)
    assert (found.node, found.rank) == (node, rank)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("no_such_command_here --x", "no_such_command_here: command not found"),
        ("bash ./not_there.sh", "not_there.sh: No such file or directory"),
        ("./not_there.sh", "not_there.sh: No such file or directory"),
        ("touch plain; ./plain", "plain: Permission denied"),
        ("sh -c 'no_such_command_here'", "no_such_command_here: "),
        ("sh -c 'kill -SEGV $$'; true", "Segmentation fault"),
        ("sh -c 'kill -KILL $$'; true", "Killed"),
        ("PYTHON not_there.py", "can't open file"),
        ("PYTHON -m not_there", "No module named not_there"),
        ("PYTHON -c 'import not_there'", "ModuleNotFoundError: No module named 'not_there'"),
        ("printf 'x = (' > bad.py; PYTHON bad.py", "SyntaxError: '(' was never closed"),
        ("PYTHON -c 'import os; os.abort()'", "Aborted"),
        ("PYTHON -X faulthandler -c 'import ctypes; ctypes.string_at(0)'", "Fatal Python error: Segmentation fault"),
        ("PYTHON -c 'raise ExceptionGroup(\"both\", [ValueError(1)])'", "ExceptionGroup: both (1 sub-exception)"),
        ("PYTHON -c 'raise SystemExit(\"error: my own words\")'", "error: my own words"),
        ("PYTHON -m corral doctor --path /no/such/data", "paths: expected /no/such/data there, found No such file"),
    ],
)
def test_what_bash_and_python_really_say_is_found(tmp_path, script, said):
    (tmp_path / "job.sh").write_text(script.replace("PYTHON", sys.executable) + "\n")
    command = ["bash", "job.sh"]
    out = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    found = driver("before", *out.stdout.splitlines())
    assert found is not None, out.stdout
    assert said in found.text


def test_a_cause_comes_before_what_its_peers_say_of_it():
    reader = FirstError()
    for line in traceback("RuntimeError: [gloo/tcp/pair.cc:589] Connection closed by peer [10.0.0.1]:3"):
        reader.feed("node-0/rank-1", 0, 1, line, 10.0)
    assert reader.found is not None
    assert reader.found.rank == 1
    reader.feed("driver", None, None, "error: worker node-1 rank 5 (pid 7) died: signal 9 (SIGKILL)", 11.0)
    assert (reader.found.node, reader.found.rank, reader.found.peer) == (1, 5, False)


def test_of_one_rank_the_first_of_its_kind_is_told():
    for errors in (["Connection reset by peer", "Broken pipe"], ["plain", "plainer"]):
        lines = [line for error in errors for line in traceback(f"OSError: {error}")]
        found = driver(*lines)
        assert found is not None
        assert found.text == f"OSError: {errors[0]}"


def test_the_earliest_of_several_ranks_is_told():
    reader = FirstError()
    for rank, time in ((3, 12.0), (1, 10.0), (2, 11.0)):
        for line in traceback(f"ValueError: of {rank}"):
            reader.feed(f"node-0/rank-{rank}", 0, rank, line, time)
    assert reader.found is not None
    assert reader.found.text == "ValueError: of 1"


def test_an_error_that_was_caught_gives_way_to_the_one_that_ended_the_job():
    reader = FirstError()
    for line in traceback("OSError: cannot reach the tracker"):
        reader.feed("driver", None, None, line, 10.0)
    reader.feed("driver", None, None, "step 1", 10.0 + OUTLIVED + 1)
    assert reader.found is not None
    assert reader.found.text == "OSError: cannot reach the tracker"
    for line in traceback("ValueError: the end"):
        reader.feed("driver", None, None, line, 100.0)
    assert reader.found.text == "ValueError: the end"


def test_tracebacks_of_two_ranks_in_one_stream_do_not_mix():
    mixed = [
        line
        for pair in zip(traceback("ValueError: of 0", "[rank0]: "), traceback("KeyError: 1", "[rank1]: "), strict=True)
        for line in pair
    ]
    found = driver(*mixed)
    assert found is not None
    assert (found.rank, found.text) == (0, "ValueError: of 0")


def test_a_long_error_is_cut_and_an_unfinished_traceback_is_none():
    found = driver(*traceback("ValueError: " + "x" * 5000))
    assert found is not None
    assert len(found.text) == LONGEST
    assert driver(*traceback("ValueError: never printed")[:3]) is None


@pytest.mark.parametrize(
    "line",
    [
        'text = "Traceback (most recent call last):"',
        "no error: all good",
        "INFO: 0 errors, died: none",
        "Killed time by waiting",
        "ValueError: without a traceback before it",
        "2 workers died: none of ours",
        "default: not found in cache, downloading",
        "uses python: 3.12",
        "FAILED tests/test_a.py::test_b on node-1: expected 1, found 2",
        "FAILED  to reach the moon",
        "ok  paths      2 paths: expected 2, found 2",
    ],
)
def test_a_line_that_only_looks_like_an_error_is_none(line):
    assert driver("x", line, "y") is None
