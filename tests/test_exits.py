"""Signals that something swallows, that arrive while modules are imported, or that the shell has switched off."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys
from corral.exits import ending_on_the_spot, raise_lost_signal, run_command, signals_held

def swallowed():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        signal.pause()
    except BaseException:
        print('swallowed', flush=True)
"""
TAIL = "\nsys.exit(run_command(command))"
NUMBERS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
WORDS = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n"}


def run(command: str, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    program = HEAD + command + TAIL
    return subprocess.run([sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, timeout=60)


@NUMBERS
@pytest.mark.parametrize("rest", ["return 0", "1 // 0", "sys.exit(7)"])
def test_a_swallowed_signal_still_decides_the_exit_code(number: signal.Signals, rest: str):
    done = run(f"def command():\n    swallowed()\n    {rest}", number)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "swallowed\n", WORDS[number])


@NUMBERS
def test_a_swallowed_signal_is_raised_again_between_steps(number: signal.Signals):
    done = run(
        "def command():\n    raise_lost_signal()\n    swallowed()\n    raise_lost_signal()\n    print('on')", number
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "swallowed\n", WORDS[number])


@NUMBERS
def test_nothing_can_swallow_a_signal_while_modules_are_imported(number: signal.Signals):
    done = run("def command():\n    with ending_on_the_spot():\n        swallowed()\n    return 0", number)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", WORDS[number])


@NUMBERS
def test_a_held_signal_waits_for_the_end_of_the_block(number: signal.Signals):
    block = "        os.kill(os.getpid(), int(sys.argv[1]))\n        print('whole', flush=True)\n"
    done = run(f"def command():\n    with signals_held():\n{block}    print('on')", number)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "whole\n", WORDS[number])


def test_an_ignored_ctrl_c_stays_ignored():
    command = "def command():\n    os.kill(os.getpid(), signal.SIGINT)\n    return 5"
    command += "\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run(command, signal.SIGINT).returncode == 5
