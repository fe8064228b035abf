"""What went wrong with Ray jobs in the wild, done to a real Ray head: the numbers are those of the project's list of
incidents. A whole service and its client run each job, so the verdict and every line are what a user gets."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corral.errors import InfraError
from corral.job.backends.base import Presence
from corral.job.backends.ray_jobs import backend as ray_backend
from corral.job.backends.ray_jobs.api import JobsApi
from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.core.classify import lost
from corral.job.protocol.states import FailureClass
from corral.job.service.settings import Nodes, RayCluster, Settings
from tests.job.backends.contract import JOB, ONE, DeafService, until_presence
from tests.job.backends.contract import Place as BackendPlace
from tests.job.backends.ray_jobs.head import Head, ray_head
from tests.job.e2e.faults import Place, in_order, place, until

pytestmark = pytest.mark.slow

# Prints, waits at a gate, prints on and exits as told.
GATED = """
gate() { touch "$GATES/$1.reached"; while [ ! -e "$GATES/$1.open" ]; do sleep 0.05; done; }
for i in $(seq 0 99); do echo "first $i"; done
gate "$1.a"
for i in $(seq 0 99); do echo "second $i"; done
gate "$1.b"
for i in $(seq 0 99); do echo "third $i"; done
exit "${2:-0}"
"""
HELD = 'touch "$GATES/held.reached"; while [ ! -e "$GATES/held.open" ]; do sleep 0.05; done\n'
GIANT = """
echo before
head -c 5000000 /dev/zero | tr '\\0' y; echo
echo after
printf 'no line end'
exit 7
"""
FLOOD = """
for i in $(seq 0 199999); do echo "flood $i and some text that makes the line as long as they are"; done
exit 7
"""
PYTHON = """
import sys, time
print("without a flush")
print("and without a line end", end="")
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
BYTES = r"""
printf 'good\n\377\376 bad bytes\nmore\n'
exit 7
"""
CHILDREN = """
trap 'exit 3' TERM
sleep 98765 &
setsid bash -c "trap '' TERM; while :; do sleep 0.1; done; : corral-stray-$1" &
touch "$GATES/children"
while :; do sleep 0.1; done
"""
SECRET = """
echo "the secret is $HIDDEN"
cat beside.txt
printf 'one\\ntwo\\n'; echo three >&2
exit 7
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head(env={"RAY_JOB_START_TIMEOUT_SECONDS": "25"}, block=False) as it:
        yield it


@pytest.fixture
def at(head: Head, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/HIDDEN").write_text("hush-hush-4711")
    options = ["--backend", "ray", "--address", head.address, "--agent-dir", tmp_path / "nodes"]
    with place(*options, "--secrets-dir", tmp_path / "secrets", "--default-kind", "cpu") as it:
        for name, text in {
            "job.sh": GATED, "giant.sh": HELD + GIANT, "flood.sh": HELD + FLOOD, "bytes.sh": HELD + BYTES,
            "python.py": PYTHON, "children.sh": CHILDREN, "secret.sh": SECRET,
        }.items():  # fmt: skip
            it.script(name, text)
        it.script("beside.txt", "from the bundle\n")
        yield it
        # What a test left at the cluster, which outlives it.
        asyncio.run(_end_all(head, it.service.data))


async def _end_all(head: Head, data_dir: Path) -> None:
    until(head.answers, "the dashboard answers")
    backend = RayJobsBackend(Settings(data_dir, ray=RayCluster(head.address)))
    for name in await backend.list_owned():
        await backend.destroy(name)


async def over(head: Head) -> bool:
    """Whether all jobs are, by Ray's word."""
    return all(job.over for job in await JobsApi(head.address).jobs())


def gated(at: Place, name: str, code: int = 7, *options: object):
    client = at.submit("--name", name, *options, arguments=(name, code))
    at.reached(f"{name}.a.reached")
    return client


def three_parts(lines: list[str]) -> None:
    assert len(lines) == 300
    for part in ("first", "second", "third"):
        in_order(lines, part, 100)


def forgotten(at: Place, head: Head) -> None:
    """Nothing of any job is left at the cluster."""

    async def jobs() -> list[str]:
        api = JobsApi(head.address)
        return [job.submission_id for job in await api.jobs()]

    left: list[str] = []

    def none() -> bool:
        left[:] = asyncio.run(jobs())
        return not left

    try:
        until(none, "Ray has no job any more")
    except AssertionError:
        raise AssertionError(f"{left}: {at.service.log()[-4000:]}") from None


def test_17_a_failed_job_ends_with_its_own_exit_code(at, head):
    """`ray job logs --follow` of a failed job exits 0. With a bundle, a secret, and both streams."""
    client = at.submit("--secret", "HIDDEN", script="secret.sh")
    assert client.done() == 7
    assert client.lines[:2] == ["the secret is ***", "from the bundle"]
    assert sorted(client.lines[2:]) == ["one", "three", "two"]
    assert client.verdict.startswith("FAILED (user): ")
    assert "exit code 7" in client.verdict
    for path in at.service.data.rglob("*"):
        assert not path.is_file() or b"hush-hush-4711" not in path.read_bytes(), path
    forgotten(at, head)


@pytest.mark.parametrize("incident", ["1", "3"])
def test_1_3_the_dashboard_dies_while_it_is_followed(at, head, incident):
    """Close code 1006 for whoever follows; the job does not notice. In 3 the service is not heard either, so the log
    of Ray is the only way."""
    client = gated(at, f"dash{incident}")
    client.printed("first 99")
    if incident == "3":
        at.service.kill()
    again = head.kill_dashboard()
    at.open(f"dash{incident}.a.open")
    at.reached(f"dash{incident}.b.reached")
    if incident == "3":
        at.service.start()
    client.printed("second 99")
    assert at.service.state(client.job_id) == "RUNNING"
    at.open(f"dash{incident}.b.open")
    again()
    assert client.done(120) == 7
    three_parts(client.lines)
    forgotten(at, head)


def test_the_service_is_killed_and_comes_back(at, head):
    client = gated(at, "service")
    client.printed("first 99")
    at.service.kill()
    at.open("service.a.open")
    at.reached("service.b.reached")
    at.service.start()
    client.printed("second 99")
    at.open("service.b.open")
    assert client.done() == 7
    three_parts(client.lines)
    forgotten(at, head)


def test_the_service_is_away_while_the_job_ends(at, head):
    """What nobody took over HTTP lies in Ray's log of the agent."""
    client = gated(at, "away")
    client.printed("first 99")
    at.service.kill()
    at.open("away.a.open")
    at.open("away.b.open")

    until(lambda: asyncio.run(over(head)), "the job is over", 120)
    at.service.start()
    assert client.done(120) == 7
    three_parts(client.lines)
    assert client.verdict.startswith("FAILED (user): ")
    forgotten(at, head)


@pytest.mark.parametrize("script", ["giant.sh", "bytes.sh", "flood.sh"])
@pytest.mark.parametrize("away", [False, True], ids=["heard", "service away"])
def test_6_7_8_output_that_ray_s_own_log_socket_dies_of(at, head, script, away):
    """A line of 5 MB, bytes that are no UTF-8, 13 MB of lines. The agent says it in pieces that Ray can send."""
    client = at.submit(script=script)
    at.reached("held.reached")
    if away:
        assert client.job_id
        at.service.kill()
        at.open("held.open")
        until(lambda: asyncio.run(over(head)), "the job is over", 200)
        at.service.start()
    at.open("held.open")
    assert client.done(240) == 7, client.err
    lines = client.lines
    if script == "flood.sh":
        assert [line.split()[1] for line in lines if line.startswith("flood ")] == [str(i) for i in range(200_000)]
    elif script == "bytes.sh":
        assert lines[0] == "good"
        assert lines[-1] == "more"
        assert len(lines) == 3
    else:
        assert lines[0] == "before"
        assert lines[-2:] == ["after", "no line end"]
        assert sum(len(line) for line in lines[1:-2]) > 0
    assert client.verdict.startswith("FAILED (user): ")


def test_13_what_is_printed_without_a_flush_comes_before_the_end(at):
    client = at.submit(script="python.py", arguments=(8,))
    client.printed("without a flush")
    assert client.process.poll() is None
    assert client.done() == 7
    assert client.lines == ["without a flush", "and without a line end"]


def test_16_the_supervisor_of_ray_dies(at, head):
    """Ray then knows no exit code, and the agent is killed with it: nobody's fault but the infrastructure's."""
    client = gated(at, "supervisor")
    supervisor = until(lambda: head.find("JobSupervisor"), "Ray's supervisor of the job")
    supervisor[0].kill()
    assert client.done(120) == 75
    assert client.verdict.startswith("FAILED (infra): ")
    in_order(client.lines, "first", 100)
    forgotten(at, head)


def test_24_a_stop_leaves_no_children(at, head):
    client = at.submit(script="children.sh", arguments=("24",))
    at.reached("children")
    assert head.find("corral-stray-24")
    client.process.send_signal(signal.SIGINT)
    assert client.done() == 130
    until(lambda: not head.find("corral-stray-24") and not head.find("sleep 98765"), "all children are gone")
    forgotten(at, head)


def test_11_each_line_comes_once_with_three_nodes_on_one_host(at, head):
    """Ray's log monitors of nodes on one host would each repeat what workers print."""

    async def nodes() -> int:
        return sum(node.alive for node in await JobsApi(head.address).nodes())

    added = []
    for number in (1, 2):  # one by one: of two that start at the same moment Ray now and then loses one
        added.append(head.add_node(f"w{number}", number, "--num-cpus", "1"))
        until(lambda: asyncio.run(nodes()) == len(added) + 1, f"{number + 1} nodes", 120)
    at.script("ranks.py", RANKS)
    client = at.submit("--nodes", 3, "--timeout-start", 200, script="ranks.py")
    code = client.done(240)
    assert (code, client.verdict[:6]) == (7, "FAILED"), client.err
    events = at.service.events(client.job_id)
    for rank in range(3):
        said = [event["line"] for event in events if event["type"] == "log" and event.get("rank") == rank]
        assert said == [f"rank {rank} says {number}" for number in range(20)]
    for process in added:
        process.terminate()
    for process in added:
        process.wait(30)


RANKS = """
import os, pathlib, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

@ray.remote(num_cpus=0)
def work(folder, node, rank):
    path = pathlib.Path(folder) / "logs" / f"node-{node}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(20):
            print(f"rank {rank} says {number}", file=file, flush=True)

ray.init(log_to_driver=False, logging_level="ERROR")
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
assert len(nodes) == 3, nodes
run = os.environ["CORRAL_RUN_DIR"]
ray.get([work.options(scheduling_strategy=On(node, soft=False)).remote(run, n, n) for n, node in enumerate(nodes)])
sys.exit(7)
"""


def settings_of(head: Head, tmp_path: Path) -> Settings:
    nodes = Nodes(agent_dir=str(tmp_path / "nodes"), python=sys.executable)
    return Settings(tmp_path / "data", backend="ray", ray=RayCluster(head.address), nodes=nodes)


def test_21_a_job_that_ray_gave_up_does_not_start_afterwards(head, tmp_path, monkeypatch):
    """What it asked for never came within Ray's own limit; Ray leaves its supervisor waiting."""
    whole = ray_backend.submission_of
    monkeypatch.setattr(ray_backend, "submission_of", lambda *given: replace(whole(*given), cpus=64))

    async def life() -> None:
        with DeafService() as service:
            backend = RayJobsBackend(settings_of(head, tmp_path))
            spec = BackendPlace(lambda: backend, service.url, tmp_path).spec(f"touch {tmp_path}/began")
            await backend.provision(spec, ONE)
            seen = await backend.observe(spec.submission_id)
            assert (seen.presence, seen.rayjob_status) == (Presence.STARTING, "PENDING")
            end = time.monotonic() + 90
            while (seen := await backend.observe(spec.submission_id)).presence is Presence.STARTING:
                assert time.monotonic() < end
                await asyncio.sleep(0.2)
            verdict = lost(seen, 6.0)
            assert (verdict.failure_class, verdict.cause) == (FailureClass.INFRA, "ray_start")
            await backend.destroy(spec.submission_id)
            assert await backend.list_owned() == []
            assert not (tmp_path / "began").exists()

    asyncio.run(life())


def test_2_the_raylet_of_a_head_with_a_token_is_told_to_end(tmp_path):
    """Ray closes the log socket with 1000 and goes on to say RUNNING; its own client exits 0. The head asks for a
    token, over REST and on the socket."""
    token = "0123456789abcdef" * 2
    (tmp_path / "token").write_text(f"{token}\n")
    (tmp_path / "work").mkdir()

    async def life(head: Head) -> None:
        settings = settings_of(head, tmp_path)
        with DeafService() as service:
            without = RayJobsBackend(settings)
            at = BackendPlace(lambda: without, service.url, tmp_path / "work")
            spec = at.spec(f"echo said; touch {at.folder}/began; while :; do sleep 0.05; done")
            with pytest.raises(InfraError, match="asks for a token"):
                await without.provision(spec, ONE)
            backend = RayJobsBackend(replace(settings, ray=RayCluster(head.address, tmp_path / "token")))
            await backend.provision(spec, ONE)
            await until_presence(backend, spec.submission_id, Presence.ACTIVE)
            await asyncio.to_thread(until, (at.folder / "began").exists, "the command runs")
            while not (settings.data_dir / f"jobs/{JOB}/attempt-1/driver.log").exists():
                await backend.fetch(spec.submission_id, {})
            (raylet,) = head.find("raylet/raylet")
            raylet.send_signal(signal.SIGTERM)
            end = time.monotonic() + 120
            while (seen := await backend.observe(spec.submission_id)).presence is not Presence.ENDED:
                assert time.monotonic() < end, seen
                await asyncio.sleep(0.5)
            if (record := await backend.end_record(spec.submission_id)) is None:
                assert lost(seen, 6.0).failure_class is FailureClass.INFRA
            else:
                assert record.exit_code != 0

    with ray_head(block=False, env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}) as head:
        asyncio.run(life(head))
