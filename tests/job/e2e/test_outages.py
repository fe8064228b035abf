"""The service goes away and comes back, in each way that happens: no line is lost or told twice."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.job.e2e.faults import in_order, interrupt, place, until
from tests.job.e2e.test_floods import RANKS

WAITS = 'echo began; touch "$GATES/$1"; until [ -e "$GATES/$1.go" ]; do sleep 0.05; done; echo ended'


@pytest.fixture(scope="module")
def at():
    with place() as it:
        it.script("waits.sh", WAITS)
        it.script("ranks.py", RANKS)
        yield it


@pytest.mark.slow
def test_a_service_that_ends_in_good_order_and_comes_back_on_another_port(at):
    """Its agent is told the new address; a client has to be."""
    client = at.submit(script="waits.sh", arguments=("moved",))
    at.reached("moved")
    job = client.job_id
    assert at.service.stop() == 0
    at.open("moved.go")
    client.close()
    at.service.port = 0
    at.service.start()
    watch = at.client("watch", job)
    assert watch.done() == 0
    assert watch.lines == ["began", "ended"]
    agent = (at.service.attempt(job) / "agent.log").read_text()
    assert "end record: status 204" in agent  # delivered, not found on the disk


@pytest.mark.slow
def test_ctrl_c_while_the_service_is_down(at):
    """The client leaves and says that the job may go on, which it does."""
    client = at.submit(script="waits.sh", arguments=("deaf",))
    at.reached("deaf")
    job = client.job_id
    at.service.kill()
    sent = interrupt(client)
    assert client.done(30.0) == 130
    assert time.monotonic() - sent < 15.0
    assert f"corral cancel {job}" in client.err
    at.service.start()
    assert at.service.state(job) in ("PROVISIONING", "PREFLIGHT", "RUNNING")  # as far as the service had heard
    at.open("deaf.go")
    assert at.client("watch", job).done() == 0


@pytest.mark.slow
def test_an_attempt_whose_agent_is_lost_is_tried_again(at):
    """With the service killed just after, too: there is one second attempt, and nothing of the first."""
    at.script("again.sh", 'echo "attempt $CORRAL_JOB_ATTEMPT"; [ "$CORRAL_JOB_ATTEMPT" = 2 ] || sleep 600')
    client = at.submit("--retry-infra", "1", script="again.sh")
    client.printed("attempt 1")
    at.service.one(client.job_id, "corral.job.agent").kill()
    at.service.kill()
    at.service.start()
    assert client.done() == 0
    assert client.lines == ["attempt 1", "attempt 2"]
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_a_client_that_is_told_to_end(at):
    """SIGTERM cancels as SIGINT does, and is told apart by the exit code."""
    client = at.submit(script="waits.sh", arguments=("told",))
    at.reached("told")
    client.process.send_signal(signal.SIGTERM)
    assert client.done(15.0) == 143
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_a_flood_through_many_kills(at, seed):
    """4 ranks write 200,000 lines; the service is killed 8 times meanwhile, under two watchers."""
    moments, lines = random.Random(seed), 50_000
    client = at.submit("--name", f"flood-{seed}", script="ranks.py", arguments=(lines, 4))
    job = client.job_id
    watch = at.client("watch", job)
    for _ in range(8):
        time.sleep(moments.uniform(0.1, 1.5))  # the moment is the fault
        at.service.kill()
        at.service.start()
    for reader in (client, watch):
        assert reader.done(300.0) == 0, reader.err[-2000:]
        seen = reader.lines
        assert len(seen) == 4 * lines
        for rank in range(4):
            prefix = f"[node-0 rank-{rank}] "
            of_rank = [line.removeprefix(prefix) for line in seen if line.startswith(prefix)]
            assert of_rank == [f"rank {rank} line {n} loss 0.123456 reward 0.5" for n in range(lines)]
    at.service.events(job)  # gap-free
    at.service.nothing_left(job)


@pytest.mark.slow
def test_a_line_is_printed_once_although_its_answer_was_lost(at):
    """The driver's own lines, while the service is killed and started again at once."""
    at.script("counts.sh", 'for i in $(seq 0 399); do echo "count $i"; sleep 0.005; done')
    client = at.submit(script="counts.sh")
    client.printed("count 50")
    for _ in range(2):
        at.service.kill()
        at.service.start()
    assert client.done() == 0
    in_order(client.lines, "count", 400)
    assert len(client.lines) == 400
    until(lambda: at.service.http.get("/readyz").status_code == 200, "the service is well")
