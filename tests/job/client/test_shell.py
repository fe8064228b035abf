"""examples/submit_and_wait_rayjob.sh with the real bash, curl and jq against a real service, also over a bad line."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corral.job.protocol.states import FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict
from tests.job.client.wire import proxy
from tests.job.service.running import Running, failure, running, until

SCRIPT = Path(__file__).parents[3] / "examples" / "submit_and_wait_rayjob.sh"
pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")


CANCELLED = Verdict(status=Status.CANCELLED, cause="x", message="x", failure_class=FailureClass.CANCEL)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service") / "data", keep_alive=0.5) as it:
        yield it


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/train.sh").write_text("echo hi\n")
    (folder / ".hidden").write_text("no")
    return folder


class Script:
    def __init__(self, url: str, *arguments: str, cwd: Path | None = None, **env: str) -> None:
        base = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        self.process = subprocess.Popen(
            [str(SCRIPT), *arguments], cwd=cwd, env=base | {"CORRAL_URL": url} | env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.out = self.err = ""

    def done(self) -> int:
        self.out, self.err = self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def way(url: str, budgets: list[int | None], stall: bool = False) -> Iterator[str]:
    """A cutting proxy in a thread; its URL."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def main() -> None:
        async with proxy(url, budgets, stall) as (at, _):
            found.append(at)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[main()])
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


def submitted(service: Running, *arguments: str, cwd: Path, **env: str) -> tuple[Script, str]:
    known = {job.job_id for job in service.store.active()}
    script = Script(service.url, *arguments, cwd=cwd, **env)
    fresh: list[str] = []

    def look() -> bool:
        fresh[:] = [job.job_id for job in service.store.active() if job.job_id not in known]
        assert script.process.poll() is None, script.process.communicate()
        return bool(fresh)

    until(look, "a job is submitted")
    return script, fresh[0]


def test_submit_and_wait(service, source):
    script, job = submitted(
        service, "--nodes", "2", "--devices", "4", "--env", "A=b=c\nd é", "--env", "B=", "--name", "n-1",
        "--", "scripts/train.sh", "x=1", "--flag", "a b", "", cwd=source,
    )  # fmt: skip
    service.run(job)
    service.lines(job, ["\tdriver  line ", "", "back\\slash $HOME `id` é\x1b[31m", "a\x1fb"])
    service.lines(job, ["from a rank"], "node-0/rank-5", rank=5)
    service.end(job, Status.SUCCEEDED, exit_code=0)
    assert script.done() == 0
    assert script.out.split("\n") == [
        "\tdriver  line ", "", "back\\slash $HOME `id` é\ufffd[31m", "a\ufffdb", "[node-0 rank-5] from a rank", "",
    ]  # fmt: skip
    assert "-- RUNNING running\n" in script.err
    assert script.err.splitlines()[-1].startswith("SUCCEEDED")
    assert script.err.endswith(f"; job {job}\n")
    asked = service.store.get(job).request
    assert (asked.script, asked.args) == ("scripts/train.sh", ["x=1", "--flag", "a b", ""])
    assert (asked.resources.nodes, asked.resources.accelerators_per_node) == (2, 4)
    assert (asked.env, asked.name_suffix, asked.lease) == ({"A": "b=c\nd é", "B": ""}, "n-1", None)
    assert service.service.bundles.members(asked.bundle) == {"scripts/train.sh"}


@pytest.mark.parametrize(
    ("status", "fields", "code", "said"),
    [
        (Status.FAILED, failure(failing_rank=5, failing_node=1, first_error="E: no"), 3, "rank 5 on node-1: E: no"),
        (Status.FAILED, failure(message="FAILED (user): said; exit code 3"), 3, "FAILED (user): said; exit code 3; "),
        (Status.FAILED, {"failure_class": FailureClass.INFRA}, 75, "FAILED (infra)"),
        (Status.FAILED, {"failure_class": FailureClass.CONFIG}, 78, "FAILED (config)"),
        (Status.FAILED, failure(exit_code=137), 137, "exit code 137"),
        (Status.FAILED, failure(exit_code=None), 1, "FAILED (user)"),
        (Status.TIMEOUT, {"failure_class": FailureClass.TIMEOUT, "cause": "hang"}, 124, "TIMEOUT (hang)"),
        (Status.CANCELLED, {"failure_class": FailureClass.CANCEL, "cause": "lease"}, 130, "CANCELLED (lease)"),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_verdicts(service, status, fields, code, said):
    job = service.submit()
    service.run(job)
    service.end(job, status, **fields)
    scripts = [Script(service.url, "--job", job), Script(service.url, "--compat", "--job", job)]
    assert [script.done() for script in scripts] == [code, 1]
    assert said in scripts[0].err.splitlines()[-1]


def finished(service: Running, lines: int) -> tuple[str, list[str]]:
    job = service.submit()
    service.run(job)
    text = [f"line {number} {'x' * (number % 50)}" for number in range(lines)]
    for start in range(0, lines, 400):
        service.lines(job, text[start : start + 400])
    service.end(job, Status.SUCCEEDED)
    return job, text


def test_each_line_once_over_a_line_that_is_cut(service):
    job, text = finished(service, 400)
    choose = random.Random(3)
    for budgets in ([700, 1500, 160, 9000], [choose.randrange(100, 12_000) for _ in range(5)]):
        with way(service.url, budgets) as url:
            script = Script(url, "--job", job)
            assert script.done() == 0, script.err
        assert script.out.splitlines() == text
        assert "connection lost" in script.err


@pytest.mark.slow
def test_cut_at_many_bytes(service):
    job, text = finished(service, 12)
    for position in range(0, 3000, 37):
        with way(service.url, [position]) as url:
            script = Script(url, "--job", job)
            assert script.done() == 0, script.err
        assert script.out.splitlines() == text


@pytest.mark.slow
def test_a_connection_that_is_silent_is_lost(service):
    job, text = finished(service, 400)
    with way(service.url, [9000], stall=True) as url:
        script = Script(url, "--job", job)
        assert script.done() == 0
    assert script.out.splitlines() == text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_and_waits_for_the_end(service, source, number, code):
    script, job = submitted(service, "--", "scripts/train.sh", cwd=source)
    service.run(job)
    service.lines(job, ["ready"])
    assert script.process.stdout.readline() == "ready\n"
    script.process.send_signal(number)
    until(lambda: service.store.get(job).cancel, "the cancel arrives")
    service.lines(job, ["last words"])
    service.end(job, Status.CANCELLED, failure_class=FailureClass.CANCEL)
    assert script.done() == code
    assert script.out == "last words\n"


def test_ci_has_a_lease_and_a_key_and_remote_commands_are_text(service, source, tmp_path):
    env = {
        "GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "o/r", "GITHUB_SHA": "a" * 40, "GITHUB_REF_NAME": "main",
        "GITHUB_RUN_ID": "99", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_JOB": "e2e", "GITHUB_OUTPUT": str(tmp_path / "out"),
    }  # fmt: skip
    script, job = submitted(service, "--lease", "2", "--", "scripts/train.sh", cwd=source, **env)
    record = service.store.get(job)
    asked = record.request
    assert (asked.repository, asked.commit_sha, asked.branch, asked.lease) == ("o/r", "a" * 40, "main", 2.0)
    assert (asked.github_run_id, asked.github_run_attempt) == ("99", 2)
    until(lambda: service.store.get(job).lease_until > record.lease_until + 0.6, "the lease is renewed")
    service.run(job)
    again = Script(service.url, "--lease", "2", "--", "scripts/train.sh", cwd=source, **env)
    service.lines(job, ["::set-output name=x::y"])
    service.end(job, Status.FAILED, **failure())
    assert [script.done(), again.done()] == [3, 3]
    for one in (script, again):
        first, line, last = one.out.splitlines()
        assert first.startswith("::stop-commands::")
        assert line == "::set-output name=x::y"
        assert last == f"::{first.removeprefix('::stop-commands::')}::"
    assert sorted((tmp_path / "out").read_text().splitlines()) == [f"job_id={job}"] * 2 + ["verdict=FAILED"] * 2
    assert f"job {job} " in again.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--", "scripts/trian.sh"], 78, "scripts/trian.sh does not exist"),
        (["--", "/nowhere/x.sh"], 78, "source root"),
        (["--nodes", "99", "--", "scripts/train.sh"], 78, "99"),
        (["--nodes", "two", "--", "scripts/train.sh"], 78, "is not a whole number"),
        (["--env", "LD_PRELOAD=x", "--", "scripts/train.sh"], 78, "LD_PRELOAD is refused"),
        (["--job", "rj-ffffffffffff"], 78, "404"),
        (["--wrong"], 78, "unknown option"),
        ([], 78, "nothing to run"),
    ],
)
def test_mistakes_are_one_line(service, source, arguments, code, said):
    script = Script(service.url, *arguments, cwd=source)
    assert script.done() == code
    assert said in script.err.splitlines()[-1]
    assert script.out == ""


def test_the_token_is_kept_from_the_network_and_the_process_list(tmp_path):
    script = Script("http://corral.example", "--job", "rj-ffffffffffff", CORRAL_TOKEN="hush-hush")
    assert script.done() == 78
    assert "refusing to send the token" in script.err
    assert "hush" not in script.err


def test_no_verdict_is_75(service):
    job = service.submit()
    service.run(job)
    with way(service.url, [300] * 200) as url:
        script = Script(url, "--job", job, "--reconnect-timeout", "1")
        assert script.done() == 75
    assert "verdict not obtainable" in script.err
    service.end(job, Status.SUCCEEDED)


def test_no_service_is_no_verdict():
    script = Script("http://127.0.0.1:9", "--job", "rj-ffffffffffff", "--reconnect-timeout", "1")
    assert script.done() == 75


def test_it_leaves_nothing_behind(service, tmp_path):
    job = service.submit()
    service.move(job, JobState.CANCELLED, verdict=CANCELLED)
    script = Script(service.url, "--job", job, TMPDIR=str(tmp_path))
    assert script.done() == 130
    assert list(tmp_path.iterdir()) == []
