"""Each limit of `corral submit --timeout-X` on a job that passes it: exit code 124, and the line names the limit."""

from __future__ import annotations

import pytest

from tests.job.e2e.faults import Place, place, until


@pytest.fixture(scope="module")
def at():
    with place("--devices", "2") as it:
        it.script("chatty.sh", "while :; do echo tick; sleep 0.2; done")
        it.script("quiet.sh", "echo once; sleep 600")
        it.script("hung.py", HUNG)
        yield it


# Two ranks that count; the second one stops (as a process in an endless fault would) and the first waits for it.
HUNG = """
import json, os, pathlib, signal, subprocess, sys, time

def tell(rank, pid, calls, method):
    path = pathlib.Path(os.environ["CORRAL_RUN_DIR"], "progress", f"rank-{rank}.json")
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"rank": rank, "node": rank, "pid": pid, "calls": calls, "state": "busy",
                               "method": method, "time": time.time()}))
    new.replace(path)

other = subprocess.Popen(["sleep", "600"])
for calls in range(1, 4):
    tell(0, os.getpid(), calls, "step")
    tell(1, other.pid, calls, "step")
    time.sleep(0.1)
other.send_signal(signal.SIGSTOP)
while True:
    print("still waiting for the other rank", flush=True)
    time.sleep(0.2)
"""


def timed_out(at: Place, kind: str, seconds: float, script: str, *options: object):
    client = at.submit(f"--timeout-{kind}", seconds, *options, script=script)
    assert client.done() == 124
    assert client.verdict.startswith(f"TIMEOUT ({kind}): "), client.verdict
    assert f"(limit {seconds:g} s)" in client.verdict
    final = at.service.events(client.job_id)[-1]
    assert (final["status"], final["class"], final["cause"]) == ("TIMEOUT", "timeout", kind)
    at.service.nothing_left(client.job_id)
    return client, final


@pytest.mark.slow
def test_run(at):
    client, _ = timed_out(at, "run", 1.5, "chatty.sh")
    assert "tick" in client.lines


def test_idle(at):
    client, _ = timed_out(at, "idle", 1.5, "quiet.sh")
    assert client.lines == ["once"]


def test_hang_names_the_rank_that_stands_still(at):
    client, final = timed_out(at, "hang", 3, "hung.py")
    assert (final["failing_rank"], final["failing_node"]) == (1, 1)
    assert "rank 1 on node-1" in client.verdict
    assert "is stopped, in step" in client.verdict


@pytest.mark.slow
def test_output_is_not_progress_and_progress_is_not_output(at):
    """A job whose counters stand still but that prints has no idle time, and the other way round."""
    client = at.submit("--timeout-idle", "3", "--timeout-hang", "2.5", script="hung.py")
    assert client.done() == 124
    assert client.verdict.startswith("TIMEOUT (hang): ")


@pytest.mark.slow
def test_queue(at):
    """Of two devices one job holds both."""
    holder = at.submit("--nodes", "2", "--timeout-start", "60", script="chatty.sh")
    until(lambda: at.service.state(holder.job_id) not in ("ACCEPTED", "QUEUED"), "the first job holds the devices")
    client, _final = timed_out(at, "queue", 1, "quiet.sh")
    assert client.lines == []
    assert "RUNNING" not in client.err
    assert at.client("cancel", holder.job_id).done() == 0
    assert holder.done() == 130
    at.service.nothing_left(holder.job_id)


@pytest.mark.slow
def test_start(at):
    """Ray's nodes take longer than that."""
    client, _ = timed_out(at, "start", 0.3, "quiet.sh", "--nodes", "2")
    assert client.lines == []
    assert "still in PROVISIONING" in client.verdict


@pytest.mark.slow
def test_the_first_limit_that_passes_is_the_one_that_is_told(at):
    client = at.submit("--timeout-run", "30", "--timeout-idle", "1", script="quiet.sh")
    assert client.done() == 124
    assert client.verdict.startswith("TIMEOUT (idle): ")
