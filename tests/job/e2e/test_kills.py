"""kill -9 of each process in the way of a job: the verdict is right all the same, and nothing is left."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from tests.job.e2e.faults import Place, in_order, place, until

# Prints, waits at a gate of its own, prints on, and exits as told.
GATED = """
gate() { touch "$GATES/$1.reached"; while [ ! -e "$GATES/$1.open" ]; do sleep 0.05; done; }
for i in $(seq 0 99); do echo "first $i"; done
gate "$1.a"
for i in $(seq 0 99); do echo "second $i"; done
gate "$1.b"
for i in $(seq 0 99); do echo "third $i"; done
exit "${2:-0}"
"""


@pytest.fixture(scope="module")
def at():
    with place() as it:
        it.script("job.sh", GATED)
        yield it


def gated(at: Place, name: str, code: int = 0, *options: object):
    client = at.submit("--name", name, *options, arguments=(name, code))
    at.reached(f"{name}.a.reached")
    return client


def three_parts(lines: list[str]) -> None:
    assert len(lines) == 300
    for part in ("first", "second", "third"):
        in_order(lines, part, 100)


def test_the_service_while_a_job_runs(at):
    client = gated(at, "killed", 7)
    client.printed("first 99")
    host = at.service.one(client.job_id, "corral cluster local").pid
    at.service.kill()
    at.open("killed.a.open")
    at.reached("killed.b.reached")  # the job goes on and prints while nobody listens
    at.service.start()
    client.printed("second 99")
    assert at.service.one(client.job_id, "corral cluster local").pid == host
    at.open("killed.b.open")
    assert client.done() == 7
    three_parts(client.lines)
    assert client.verdict == f"FAILED (user): no error line in its output; exit code 7; job {client.job_id}"
    states = [event["status"] for event in at.service.events(client.job_id) if event["type"] == "status"]
    assert states == ["ACCEPTED", "QUEUED", "PROVISIONING", "PREFLIGHT", "RUNNING", "COLLECTING", "CLEANING", "FAILED"]
    at.service.nothing_left(client.job_id)


@pytest.mark.parametrize("agent", [pytest.param("lives", marks=pytest.mark.slow), "dies"])
def test_a_job_that_ends_while_the_service_is_down(at, agent):
    """With its agent, which delivers then; without, so that the service finds end record and output on the disk."""
    client = gated(at, agent)
    client.printed("first 99")
    at.service.kill()
    at.open(f"{agent}.a.open")
    at.open(f"{agent}.b.open")
    until((at.service.attempt(client.job_id) / "end.json").exists, "the job ends")
    if agent == "dies":
        at.service.one(client.job_id, "corral.job.agent").kill()
    at.service.start()
    assert client.done() == 0
    three_parts(client.lines)
    assert client.verdict.startswith("SUCCEEDED: exit code 0")
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_the_client_without_a_lease(at):
    client = gated(at, "alone")
    job = client.job_id
    client.process.kill()
    at.open("alone.a.open")
    at.open("alone.b.open")
    watch = at.client("watch", job)
    assert watch.done() == 0
    three_parts(watch.lines)


def test_the_client_with_a_lease(at):
    client = gated(at, "leased", 0, "--lease", "2")
    job = client.job_id
    until(lambda: at.service.job(job)["lease_until"], "the lease is known")
    client.process.kill()
    until(lambda: at.service.state(job) == "CANCELLED", "the lease ends", 30.0)
    final = at.service.events(job)[-1]
    assert (final["status"], final["cause"], final["class"]) == ("CANCELLED", "lease", "cancel")
    at.service.nothing_left(job)


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("corral.job.agent", "agent_lost"),
        pytest.param("corral cluster local", None, marks=pytest.mark.slow),
        pytest.param("corral.workers.supervisor", None, marks=pytest.mark.slow),
    ],
)
def test_what_carries_the_job(at, victim, said):
    name = victim.replace(" ", "-")
    client = gated(at, name)
    at.service.one(client.job_id, victim).kill()
    killed = time.monotonic()
    assert client.done(30.0) == 75
    assert time.monotonic() - killed < 20.0
    assert client.verdict.startswith("FAILED (infra): ")
    final = at.service.events(client.job_id)[-1]
    assert final["class"] == "infra"
    assert said in (None, final["cause"])
    assert [line for line in client.lines if line.startswith("first ")] == [f"first {i}" for i in range(100)]
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_a_worker_process_of_the_script(at):
    at.script("parent.sh", 'sleep 600 & echo $! > "$GATES/worker"; wait $!; code=$?; echo "worker: $code"; exit $code')
    client = at.submit(script="parent.sh")
    at.reached("worker")
    pid = int(until((at.gates / "worker").read_text, "its pid is written"))
    psutil.Process(pid).kill()
    assert client.done(30.0) == 75
    assert "exit code 137 (SIGKILL)" in client.verdict
    assert client.verdict.startswith("FAILED (infra)")
    at.service.nothing_left(client.job_id)


STARTS = 'echo $$ >> "$GATES/$1.starts"; echo "only 0"; sleep 0.2; echo "only 1"'


def random_kills(at: Place, seed: int) -> None:
    """The service is killed twice at random moments between the client's start and the end of the job."""
    moments, name = random.Random(seed), f"seed-{seed}"
    client = at.submit("--name", name, script="starts.sh", arguments=(name,))
    for _ in range(2):
        time.sleep(moments.uniform(0.3, 2.5))  # the moment is the fault, not a wait for something
        at.service.kill()
        at.service.start()
    assert client.done(90.0) == 0, client.err
    in_order(client.lines, "only", 2)
    assert len((at.gates / f"{name}.starts").read_text().split()) == 1
    listed = at.service.http.get("/api/v1/rayjobs", params={"limit": "200"}).json()["jobs"]
    assert len([job for job in listed if job["job_id"] == client.job_id]) == 1
    assert [event["attempt"] for event in at.service.events(client.job_id)][-1] == 1
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_the_service_at_a_random_moment(at):
    at.script("starts.sh", STARTS)
    random_kills(at, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_the_service_at_random_moments(at, seed):
    at.script("starts.sh", STARTS)
    random_kills(at, seed)
