"""Each way a job can fail by itself: the verdict line names class, rank and first error."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.job.e2e.faults import interrupt, place, until

TRACEBACK = r'Traceback (most recent call last):\n  File "x.py", line 1, in f\n'
RANKS = f"""
d="$CORRAL_RUN_DIR/logs/node-1"; mkdir -p "$d"
echo "rank 4 works" > "$d/rank-4.log"
printf 'rank 5 works\\n{TRACEBACK}ValueError: rewards are nan\\n' > "$d/rank-5.log"
sleep 0.3
printf '{TRACEBACK}ConnectionResetError: closed by peer\\n' >> "$d/rank-4.log"
exit 3
"""


LONG = """
trap 'echo "cleaning up"; exit 1' TERM
touch "$GATES/long"
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def at():
    with place() as it:
        it.script("three.sh", "echo before; echo after >&2; exit 3")
        it.script("import.py", "import no_such_module_here")
        it.script("config.sh", "echo 'error: trainer.nnodes=0: has to be at least 1' >&2; exit 78")
        it.script("infra.sh", "echo 'error: port 1 taken' >&2; exit 75")
        it.script("doctor.sh", f"{sys.executable} -m corral doctor --no-collective --path /no/such/data")
        it.script("segfault.sh", "kill -SEGV $$")
        it.script("killed.sh", "kill -KILL $$")
        it.script("absent.sh", "no_such_command_here")
        it.script("ranks.sh", RANKS)
        it.script("own-timeout.sh", "exit 124")
        it.script("odd.sh", "exit 100")
        it.script("long.sh", LONG)
        yield it


NO_LINE = "no error line in its output"
COMMON = [
    ("three.sh", 3, f"FAILED (user): {NO_LINE}; exit code 3"),
    ("import.py", 1, "FAILED (user): ModuleNotFoundError: No module named 'no_such_module_here'; exit code 1"),
    ("ranks.sh", 3, "FAILED (user): rank 5 on node-1: ValueError: rewards are nan; exit code 3"),
]
RARE = [
    ("config.sh", 78, "FAILED (config): error: trainer.nnodes=0: has to be at least 1; exit code 78"),
    ("infra.sh", 75, "FAILED (infra): error: port 1 taken; exit code 75"),
    ("doctor.sh", 78, "FAILED (config): paths: expected /no/such/data there, found No such file or directory; name a"),
    ("segfault.sh", 139, f"FAILED (user): {NO_LINE}; segmentation fault; exit code 139 (SIGSEGV)"),
    ("killed.sh", 75, f"FAILED (infra): {NO_LINE}; killed: out of memory, or by hand; exit code 137 (SIGKILL)"),
    ("own-timeout.sh", 124, "TIMEOUT (timeout): "),
    ("odd.sh", 1, f"FAILED (user): {NO_LINE}; exit code 100"),
]


@pytest.mark.parametrize(
    ("script", "code", "line"), [*COMMON, *(pytest.param(*row, marks=pytest.mark.slow) for row in RARE)]
)
def test_a_command_that_fails(at, script, code, line):
    result = at.root / f"{script}.json"
    client = at.submit("--result", result, script=script)
    assert client.done() == code
    assert client.verdict.startswith(line), client.verdict
    assert client.verdict.endswith(f"; job {client.job_id}")
    kept = json.loads(result.read_text())
    final = at.service.events(client.job_id)[-1]
    assert kept["exit_code"] == code
    for name in ("status", "cause", "exit_code", "failing_rank", "failing_node", "first_error"):
        assert kept["verdict"][name] == final[name]
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_a_command_that_is_not_there(at):
    client = at.submit(script="absent.sh")
    assert client.done() == 78
    assert client.verdict.startswith("FAILED (config): ")
    assert "absent.sh: line 1: no_such_command_here" in client.verdict


def test_a_script_that_is_not_there(at):
    client = at.submit(script="none/such.sh")
    assert client.done() == 78
    assert "script none/such.sh does not exist" in client.err
    assert client.err.count("\n") == 1


@pytest.mark.slow
def test_compat_knows_0_and_1(at):
    assert at.submit("--compat", script="three.sh").done() == 1


@pytest.mark.slow
def test_a_failure_of_the_infrastructure_is_tried_again(at):
    at.script("once.sh", 'echo "attempt $CORRAL_JOB_ATTEMPT"; [ "$CORRAL_JOB_ATTEMPT" = 2 ] || exit 75')
    client = at.submit("--retry-infra", "1", script="once.sh")
    assert client.done() == 0
    assert client.lines == ["attempt 1", "attempt 2"]
    assert "-- RETRYING attempt 1 failed and is tried again" in client.err


def test_ctrl_c(at):
    """The service hears of it within 2 s, all processes are gone within 10 s, the command could clean up."""
    client = at.submit(script="long.sh")
    at.reached("long")
    sent = interrupt(client)
    seen = until(
        lambda: at.service.job(client.job_id)["state"] not in ("RUNNING",) and time.monotonic(),
        "the cancel arrives",
        5.0,
    )
    assert seen - sent < 2.0
    at.service.nothing_left(client.job_id, 10.0 - (time.monotonic() - sent))
    assert client.done(10.0) == 130
    assert client.verdict.startswith("CANCELLED (")
    assert "cleaning up" in client.lines


@pytest.mark.slow
def test_ctrl_c_during_the_submission(at):
    """Whatever is under way when it comes: in the end no job runs."""
    for delay in (0.4, 0.8, 1.2):
        client = at.submit(script="long.sh")
        time.sleep(delay)  # the moment is the fault
        interrupt(client)
        code = client.done(20.0)
        assert code in (130, -2), client.err
    until(lambda: not at.service.processes(), "nothing runs", 20.0)
