"""Every class of fault on the real training job: PPO on two nodes of four devices, as `corral submit` runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.job.e2e.faults import Client, Place, interrupt, place, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = "examples/run_qwen3_06b_ppo_multinode.sh"
WORLD = 8
STARTED = 240.0  # seconds until all ranks work, on a busy machine
RUN = 600.0
MANY = 1000  # steps: a run that ends only by its fault

RAISING = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("this reward is wrong")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for made in (["model", "tiny", folder / "model", "--seed", "0"], ["data", "arithmetic", folder / "data"]):
        subprocess.run([sys.executable, "-m", "corral", *map(str, made)], check=True, timeout=RUN)
    return folder


@pytest.fixture(scope="module")
def at(inputs):
    with place("--devices", WORLD) as it:
        (it.source / "examples").mkdir()
        shutil.copy(EXAMPLES / Path(SCRIPT).name, it.source / SCRIPT)
        it.script("raising.py", RAISING)
        it.script("importing.py", f"import no_such_module_here\n{RAISING}")
        it.script("short.sh", "echo short")
        it.inputs = inputs
        yield it


def training(at: Place, *options: object, steps: int = MANY, overrides: tuple[str, ...] = ()) -> Client:
    sized = (f"trainer.total_training_steps={steps}", "trainer.total_epochs=100")
    short = ("data.max_prompt_length=256", "data.max_response_length=32")
    return at.submit(
        "--nodes", 2, "--devices", 4, "--kind", "cpu", *options,
        "--env", f"MODEL_PATH={at.inputs / 'model'}", "--env", f"DATA_DIR={at.inputs / 'data'}",
        script=SCRIPT, arguments=(*sized, *short, *overrides),
    )  # fmt: skip


def rank_process(at: Place, job: str, rank: int) -> psutil.Process:
    """The process of a rank that has begun to work."""
    path = at.service.attempt(job) / "run" / "progress" / f"rank-{rank}.json"

    def pid() -> int | None:
        try:
            said = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return said["pid"] if said["calls"] > 0 else None

    return psutil.Process(until(pid, f"rank {rank} works", STARTED))


def steps_of(lines: list[str]) -> list[int]:
    return [int(match[1]) for line in lines if (match := re.match(r"step:(\d+) ", line))]


def over(at: Place, client: Client, code: int, verdict: str, bound: float = 60.0) -> dict:
    """The client ends so, and nothing of the job is left. The final event."""
    assert client.done(bound) == code, client.err[-3000:]
    assert re.match(verdict, client.verdict), client.verdict
    at.service.nothing_left(client.job_id)
    return at.service.events(client.job_id)[-1]


def test_success_through_the_loss_of_client_and_service(at):
    """The rank lines are those of the ranks' own files, each once, as a watcher sees them that lost the service."""
    first = training(at, steps=3)
    job = first.job_id
    rank_process(at, job, 5)
    first.process.kill()
    watch = at.client("watch", job)
    watch.printed("step:1 ", STARTED)
    at.service.kill()
    at.service.start()
    assert watch.done(RUN) == 0, watch.err[-3000:]
    assert watch.verdict.startswith("SUCCEEDED: exit code 0")
    assert steps_of(watch.lines) == [1, 2, 3]
    for node, rank in [(rank // 4, rank) for rank in range(WORLD)]:
        raw = (at.service.attempt(job) / "run" / "logs" / f"node-{node}" / f"rank-{rank}.log").read_text()
        prefix = f"[node-{node} rank-{rank}] "
        seen = [line.removeprefix(prefix) for line in watch.lines if line.startswith(prefix)]
        assert seen, f"rank {rank}"
        assert seen == raw.splitlines(), f"rank {rank}"
    at.service.nothing_left(job)


def test_a_reward_that_raises(at):
    client = training(
        at, overrides=("reward.custom_reward_function.path=raising.py", "reward.custom_reward_function.name=score")
    )
    final = over(at, client, 1, r"FAILED \(user\): .*ValueError: this reward is wrong", RUN)
    assert final["class"] == "user"
    assert "this reward is wrong" in final["first_error"]


def test_a_reward_that_imports_what_is_not_there(at):
    client = training(
        at, overrides=("reward.custom_reward_function.path=importing.py", "reward.custom_reward_function.name=score")
    )
    assert client.done(RUN) in (1, 78)
    assert "no_such_module_here" in client.verdict
    at.service.nothing_left(client.job_id)


def test_a_key_that_does_not_exist(at):
    client = training(at, overrides=("trainer.no_such_key=1",))
    final = over(at, client, 78, r"FAILED \(config\): .*no_such_key.*exit code 78", RUN)
    assert final["class"] == "config"


def test_a_worker_rank_is_killed(at):
    client = training(at)
    rank_process(at, client.job_id, 5).kill()
    final = over(at, client, 75, r"FAILED \(infra\): rank 5 on node-1: ")
    assert (final["class"], final["failing_rank"], final["failing_node"]) == ("infra", 5, 1)


def test_a_ray_node_is_killed(at):
    client = training(at)
    rank_process(at, client.job_id, 5)
    raylets = [one for one in at.service.processes(client.job_id) if one.name() == "raylet"]
    assert len(raylets) == 2
    second = [one for one in raylets if any("node-1" in word for word in one.cmdline())]
    (second or raylets[1:])[0].kill()
    final = over(at, client, 75, r"FAILED \(infra\): ", 90.0)
    assert final["class"] == "infra"


def test_the_agent_is_killed(at):
    client = training(at)
    rank_process(at, client.job_id, 5)
    at.service.one(client.job_id, "corral.job.agent").kill()
    assert over(at, client, 75, r"FAILED \(infra\): ")["cause"] == "agent_lost"


def test_a_rank_stands_still(at):
    client = training(at, "--timeout-hang", "30")
    rank_process(at, client.job_id, 5).send_signal(signal.SIGSTOP)
    final = over(at, client, 124, r"TIMEOUT \(hang\): rank 5 on node-1: .*is stopped", 120.0)
    assert (final["failing_rank"], final["failing_node"]) == (5, 1)


def test_no_output(at):
    client = training(at, "--timeout-idle", "60", "--timeout-hang", "none")
    rank_process(at, client.job_id, 0).send_signal(signal.SIGSTOP)
    over(at, client, 124, r"TIMEOUT \(idle\): no output for 6", 150.0)


def test_too_long_a_run_and_too_long_a_queue(at):
    client = training(at, "--timeout-run", "25")
    until(lambda: at.service.state(client.job_id) == "RUNNING", "it runs", STARTED)
    waiting = at.submit("--timeout-queue", "1", script="short.sh")
    over(at, waiting, 124, r"TIMEOUT \(queue\): ")
    over(at, client, 124, r"TIMEOUT \(run\): the command ran for 2", 90.0)


def test_too_long_a_start(at):
    over(at, training(at, "--timeout-start", "1"), 124, r"TIMEOUT \(start\): .*still in PROVISIONING")


def test_ctrl_c(at):
    client = training(at)
    rank_process(at, client.job_id, 5)
    sent = interrupt(client)
    at.service.nothing_left(client.job_id, 10.0)
    assert time.monotonic() - sent < 10.0
    over(at, client, 130, r"CANCELLED ")


def test_a_client_with_a_lease_vanishes(at):
    client = training(at, "--lease", "3")
    job = client.job_id
    rank_process(at, job, 5)
    os.kill(client.process.pid, signal.SIGKILL)
    until(lambda: at.service.state(job) == "CANCELLED", "the lease ends", 40.0)
    assert at.service.events(job)[-1]["cause"] == "lease"
    at.service.nothing_left(job)
