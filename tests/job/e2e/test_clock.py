"""The system's clock jumps under a service: what is limited in seconds is limited in seconds that passed."""

from __future__ import annotations

import pytest

from tests.job.e2e.faults import Place, place, until
from tests.job.e2e.test_outages import WAITS

DAY = 86_400


@pytest.fixture(scope="module")
def at():
    with place() as it:
        it.script("waits.sh", WAITS)
        it.script("long.sh", "echo began; sleep 600")
        yield it


@pytest.fixture
def jump(at: Place):
    """Set the clock, so many seconds off; set right again afterwards, with a new service."""

    def set_to(seconds: int) -> None:
        at.service.clock.write_text(str(seconds))

    yield set_to
    set_to(0)
    at.service.kill()
    at.service.start()


@pytest.mark.slow
@pytest.mark.parametrize("days", [-1, 1])
def test_while_a_job_runs(at, jump, days):
    """Neither its limits nor its lease end, and a limit of seconds ends after seconds."""
    name = f"runs{days}"
    client = at.submit("--timeout-run", 600, "--timeout-idle", 300, "--lease", 60, script="waits.sh", arguments=(name,))
    at.reached(name)
    short = at.submit("--timeout-run", 4, script="long.sh")
    short.printed("began")
    jump(days * DAY)
    assert short.done(30.0) == 124
    assert short.verdict.startswith("TIMEOUT (run): the command ran for 4.")
    at.open(f"{name}.go")
    assert client.done() == 0
    assert client.lines == ["began", "ended"]
    times = [event["ts"] for event in at.service.events(client.job_id)]
    assert times == sorted(times)


@pytest.mark.slow
def test_a_restart_with_a_clock_a_day_back(at, jump):
    """What was stored lies in the future then: the job goes on and its limits still hold."""
    client = at.submit("--timeout-run", 60, "--lease", 60, script="waits.sh", arguments=("back",))
    limited = at.submit("--timeout-run", 6, "--name", "limited", script="long.sh")
    at.reached("back")
    limited.printed("began")
    at.service.kill()
    jump(-DAY)
    at.service.start()
    assert limited.done(45.0) == 124  # late at worst: counted from the restart
    at.open("back.go")
    assert client.done() == 0
    at.service.nothing_left(client.job_id)
    until(lambda: at.service.state(limited.job_id) == "TIMEOUT", "its limit holds")
