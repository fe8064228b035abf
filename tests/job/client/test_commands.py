"""The commands as a shell sees them, against a real service whose jobs move as the test says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from corral.cli import build_parser, main
from corral.job.client.files import list_files
from corral.job.client.github import Run
from corral.job.client.submit import entry_of, request_of
from corral.job.protocol.states import FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict
from tests.job.service.running import Running, failure, running, until

NOISE = {name: "" for name in os.environ if name.startswith(("GITHUB_", "CORRAL_", "SUBMITTER"))}


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
    (folder / "scripts/tool.py").write_text("1\n")
    return folder


class Client:
    """A `corral` process."""

    def __init__(
        self,
        service: Running | None,
        *arguments: str,
        cwd: Path | None = None,
        stdout: str | None = None,
        **env: str,
    ) -> None:
        base = {name: value for name, value in os.environ.items() if name not in NOISE}
        url = {} if service is None else {"CORRAL_URL": service.url}
        with open(stdout, "w") if stdout else nullcontext(subprocess.PIPE) as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "corral", *arguments], cwd=cwd, env=base | url | env,
                stdout=out, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        self.out = self.err = ""

    def done(self) -> int:
        self.out, self.err = self.process.communicate(timeout=60)
        assert "Traceback" not in self.err
        return self.process.returncode


class Call:
    """The same command inside this process: for what needs no signal, and ends by itself."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._monkeypatch = capfd, monkeypatch
        self.out = self.err = ""

    def __call__(self, service: Running | None, *arguments: str, cwd: Path | None = None, **env: str) -> int:
        with self._monkeypatch.context() as patch:
            for name in NOISE:
                patch.delenv(name)
            for name, value in ({} if service is None else {"CORRAL_URL": service.url} | env).items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            self._capfd.readouterr()
            code = main(arguments)
        self.out, self.err = self._capfd.readouterr()
        return code


@pytest.fixture
def call(capfd, monkeypatch) -> Call:
    return Call(capfd, monkeypatch)


def new_job(service: Running, known: set[str]) -> str:
    """Wait for a job that was not there."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [job.job_id for job in service.store.active() if job.job_id not in known]
        return bool(found)

    until(look, "a job is submitted")
    return found[0]


def submitted(
    service: Running, *arguments: str, cwd: Path, stdout: str | None = None, **env: str
) -> tuple[Client, str]:
    known = {job.job_id for job in service.store.active()}
    client = Client(service, "submit", *arguments, cwd=cwd, stdout=stdout, **env)
    return client, new_job(service, known)


def test_submit_streams_and_succeeds(service, source, tmp_path):
    result = tmp_path / "result.json"
    client, job = submitted(
        service, "--nodes", "2", "--devices", "4", "--env", "A=b=c", "--label", "k=v", "--priority", "3",
        "--timeout-run", "60", "--timeout-hang", "none", "--retry-infra", "2", "--result", str(result), "--kind", "cpu",
        "--", "scripts/train.sh", "x=1", "--flag", cwd=source,
    )  # fmt: skip
    service.run(job)
    service.lines(job, ["driver\x1b[31m line", "  ::error::x"])
    service.lines(job, ["from a rank"], "node-0/rank-5", rank=5)
    service.end(job, Status.SUCCEEDED, exit_code=0)
    assert client.done() == 0
    assert client.out.splitlines() == ["driver\ufffd[31m line", "  ::error::x", "[node-0 rank-5] from a rank"]
    states = re.findall("^-- ([A-Z]+) ", client.err, re.M)
    assert states == [
        "ACCEPTED",
        "QUEUED",
        "PROVISIONING",
        "PREFLIGHT",
        "RUNNING",
        "COLLECTING",
        "CLEANING",
        "SUCCEEDED",
    ]
    assert client.err.splitlines()[-1] == f"SUCCEEDED; job {job}"
    asked = service.store.get(job).request
    assert (asked.script, asked.args, asked.command) == ("scripts/train.sh", ["x=1", "--flag"], None)
    assert (asked.resources.nodes, asked.resources.accelerators_per_node, asked.resources.kind) == (2, 4, "cpu")
    assert (asked.env, asked.labels, asked.priority, asked.retry.infra) == ({"A": "b=c"}, {"k": "v"}, 3, 2)
    assert (asked.timeouts.run, asked.timeouts.hang, asked.timeouts.start) == (60.0, None, 900.0)
    assert (asked.lease, asked.name_suffix) == (None, "train")
    kept = json.loads(result.read_text())
    assert (kept["job_id"], kept["exit_code"], kept["verdict"]["status"]) == (job, 0, "SUCCEEDED")
    assert kept["last_seq"] == service.store.get(job).last_seq


@pytest.mark.parametrize(
    ("status", "fields", "code", "line"),
    [
        (
            Status.FAILED,
            failure(failing_rank=5, failing_node=1, first_error="ValueError: no"),
            3,
            "FAILED (user): rank 5 on node-1: ValueError: no; exit code 3; job {}",
        ),
        (
            Status.FAILED,
            {"failure_class": FailureClass.INFRA, "cause": "agent_lost", "message": "the agent is gone"},
            75,
            "FAILED (infra): the agent is gone; job {}",
        ),
        (
            Status.TIMEOUT,
            {"failure_class": FailureClass.TIMEOUT, "cause": "hang", "message": "no progress for 5 s"},
            124,
            "TIMEOUT (hang): no progress for 5 s; job {}",
        ),
        (
            Status.FAILED,
            failure(message="FAILED (user): as the service says it; exit code 3", first_error="other", exit_code=3),
            3,
            "FAILED (user): as the service says it; exit code 3; job {}",
        ),
        (
            Status.CANCELLED,
            {"failure_class": FailureClass.CANCEL, "cause": "lease", "message": "nobody came"},
            130,
            "CANCELLED (lease): nobody came; job {}",
        ),
    ],
)
def test_the_exit_code_is_the_verdicts(service, call, status, fields, code, line):
    job = service.submit()
    service.run(job)
    service.end(job, status, **fields)
    assert call(service, "watch", job) == code
    assert call.err.splitlines()[-1] == line.format(job)
    assert call(service, "watch", job, "--compat") == 1


def test_watch_of_a_rank_from_a_cursor(service, call):
    job = service.submit()
    service.run(job)
    service.lines(job, ["a", "b"])
    service.lines(job, ["c"], "node-0/rank-1", rank=1)
    service.lines(job, ["d"], "node-0/rank-2", rank=2)
    service.end(job, Status.SUCCEEDED)
    assert call(service, "watch", job, "--rank", "1", "--rank", "2") == 0
    assert call.out.splitlines() == ["[node-0 rank-1] c", "[node-0 rank-2] d"]
    assert call(service, "watch", job, "--after-seq", "6") == 0
    assert call.out.splitlines() == ["b", "[node-0 rank-1] c", "[node-0 rank-2] d"]
    assert call(service, "watch", job, "--types", "log") == 0
    assert len(call.out.splitlines()) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_within_two_seconds_and_waits_for_the_end(service, source, number, code):
    client, job = submitted(service, "--", "scripts/train.sh", cwd=source)
    service.run(job)
    service.lines(job, ["ready"])
    assert client.process.stdout.readline() == "ready\n"
    sent = time.monotonic()
    client.process.send_signal(number)
    until(lambda: service.store.get(job).cancel, "the cancel arrives")
    assert time.monotonic() - sent < 2
    service.lines(job, ["last words"])
    service.end(job, Status.CANCELLED, failure_class=FailureClass.CANCEL, cause="cancelled_by_user")
    assert client.done() == code
    assert client.out == "last words\n"
    assert "CANCELLED (cancelled_by_user)" in client.err.splitlines()[-1]


def test_a_second_signal_leaves_at_once(service, source):
    client, job = submitted(service, "--", "scripts/train.sh", cwd=source)
    service.run(job)
    service.lines(job, ["ready"])
    client.process.stdout.readline()
    client.process.send_signal(signal.SIGINT)
    until(lambda: service.store.get(job).cancel, "the cancel arrives")
    client.process.send_signal(signal.SIGINT)
    assert client.done() == 130
    service.end(job, Status.CANCELLED, failure_class=FailureClass.CANCEL)


def test_a_signal_reaches_the_service_though_nobody_reads_our_output(service, source):
    client, job = submitted(service, "--", "scripts/train.sh", cwd=source)
    service.run(job)
    for _ in range(20):
        service.lines(job, ["x" * 1000] * 100)  # more than a pipe holds
    client.process.stdout.read(10)
    client.process.send_signal(signal.SIGINT)
    until(lambda: service.store.get(job).cancel, "the cancel arrives")
    client.process.send_signal(signal.SIGINT)
    assert client.process.wait(timeout=10) == 130
    client.done()
    service.end(job, Status.CANCELLED, failure_class=FailureClass.CANCEL)


def test_a_signal_in_watch_leaves_the_job_alone(service):
    job = service.submit()
    service.run(job)
    service.lines(job, ["ready"])
    client = Client(service, "watch", job)
    assert client.process.stdout.readline() == "ready\n"
    client.process.send_signal(signal.SIGINT)
    assert client.done() == 130
    assert f"job {job} goes on" in client.err
    assert service.store.get(job).cancel is None
    service.end(job, Status.SUCCEEDED)


def test_a_reader_that_leaves(service, source):
    """`corral watch | head` ends; `corral submit | head` stays for the verdict."""
    client, job = submitted(service, "--", "scripts/train.sh", cwd=source)
    service.run(job)
    service.lines(job, ["ready"])
    watch = Client(service, "watch", job)
    for process in (client.process, watch.process):
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        process.stdout = None
    service.lines(job, ["more"])
    assert watch.done() == 141
    service.lines(job, ["and more"])
    service.end(job, Status.FAILED, **failure())
    assert client.done() == 3
    assert "FAILED (user)" in client.err


def test_a_full_disk_costs_no_verdict(service, source):
    client, job = submitted(service, "--", "scripts/train.sh", cwd=source, stdout="/dev/full")
    service.run(job)
    service.lines(job, ["more than the disk takes"])
    service.end(job, Status.FAILED, **failure())
    assert client.done() == 3
    assert "-- cannot write to stdout: No space left on device; the rest is not shown\n" in client.err
    logs = Client(service, "logs", job, stdout="/dev/full")
    assert logs.done() == 75
    assert logs.err == "-- cannot write to stdout: No space left on device; the rest is not shown\n"


def test_detach_and_dry_run(service, source, call):
    before = len(service.store.active())
    assert call(service, "submit", "--dry-run", "--nodes", "2", "--", "scripts/tool.py", "a b", cwd=source) == 0
    assert call.out == "would run: python scripts/tool.py 'a b'\n"
    assert len(service.store.active()) == before
    assert call(service, "submit", "--detach", "--", "python", "-c", "print(1)", cwd=source) == 0
    job = service.store.get(call.out.strip())
    assert (job.request.command, job.request.script) == (["python", "-c", "print(1)"], None)
    assert call(service, "cancel", job.job_id, "rj-ffffffffffff", job.job_id) == 78
    assert call.out.splitlines() == [f"{job.job_id} QUEUED"] * 2
    assert "rj-ffffffffffff" in call.err
    assert service.store.get(job.job_id).cancel == "cancelled_by_user"


def test_jobs_and_logs(service, call):
    job = service.submit(name_suffix="listed", labels={"find": "me"}, github_run_id="77")
    service.run(job)
    service.lines(job, ["one", "two\x1b[1m"])
    service.lines(job, ["three"], "node-0/rank-1", rank=1)
    assert call(service, "jobs", "--label", "find=me") == 0
    head, row = call.out.splitlines()
    assert head.split()[:3] == ["JOB", "STATE", "AGE"]
    assert row.split()[:2] == [job, "RUNNING"]
    assert "listed" in row
    assert call(service, "jobs", "--json", "--run", "77", "--state", "running", "--repository", "local/local") == 0
    assert [item["job_id"] for item in json.loads(call.out)["jobs"]] == [job]
    assert call(service, "jobs", "--label", "find=other") == 0
    assert len(call.out.splitlines()) == 1
    for more, said in (([], "one\ntwo\ufffd[1m\n[node-0/rank-1] three\n"), (["--rank", "1"], "three\n"),
                       (["--tail", "1"], "[node-0/rank-1] three\n")):  # fmt: skip
        assert call(service, "logs", job, *more) == 0
        assert call.out == said
    service.end(job, Status.SUCCEEDED)


def test_a_live_table(service):
    job = service.submit(labels={"live": "yes"})
    client = Client(service, "jobs", "--watch", "--label", "live=yes")
    assert client.process.stdout.readline().startswith("JOB ")
    assert client.process.stdout.readline().split()[:2] == [job, "QUEUED"]
    service.run(job)
    until(lambda: client.process.stdout.readline().split()[:2] == [job, "RUNNING"], "the table changes")
    client.process.send_signal(signal.SIGINT)
    assert client.done() == 130
    assert client.err == "interrupted\n"
    service.end(job, Status.SUCCEEDED)


def test_cleanup(service, call):
    jobs = [service.submit(github_run_id="88", github_run_attempt=1, name_suffix=name) for name in ("a", "b")]
    service.run(jobs[0])
    client = Client(service, "cleanup", "--workflow", "88", "--attempt", "1")
    until(lambda: all(service.store.get(job).cancel for job in jobs), "the cancels arrive")
    assert call(service, "cleanup", "--workflow", "88", "--timeout", "0.3") == 75
    assert "2 of 2 jobs are not gone" in call.err
    service.end(jobs[0], Status.CANCELLED, failure_class=FailureClass.CANCEL)
    service.move(jobs[1], JobState.CANCELLED, verdict=CANCELLED)
    assert client.done() == 0
    assert client.out.splitlines()[-1] == "workflow 88: 2 jobs, all gone"
    assert call(service, "cleanup", "--workflow", "88") == 0
    assert call(service, "cleanup", "--workflow", "no-such-run") == 0


def test_ci_has_a_lease_a_key_and_a_summary(service, source, call, tmp_path):
    env = {
        "GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "o/r", "GITHUB_SHA": "a" * 40, "GITHUB_REF_NAME": "main",
        "GITHUB_RUN_ID": "99", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_JOB": "e2e",
        "GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }  # fmt: skip
    client, job = submitted(service, "--lease", "2", "--", "scripts/train.sh", cwd=source, **env)
    record = service.store.get(job)
    asked = record.request
    assert (asked.repository, asked.commit_sha, asked.branch) == ("o/r", "a" * 40, "main")
    assert (asked.github_run_id, asked.github_run_attempt, asked.lease) == ("99", 2, 2.0)
    until(lambda: service.store.get(job).lease_until > record.lease_until + 0.6, "the lease is renewed twice")
    assert call(service, "submit", "--lease", "2", "--detach", "--", "scripts/train.sh", cwd=source, **env) == 0
    assert job in call.out
    assert call(service, "submit", "--lease", "2", "--detach", "--", "scripts/train.sh", "x", cwd=source, **env) == 78
    assert "other content" in call.err
    service.run(job)
    service.lines(job, ["::set-output name=x::y", "##[error]z"])
    service.end(job, Status.FAILED, **failure(first_error="boom"))
    assert client.done() == 3
    assert client.err == ""
    assert re.search(
        r"^::stop-commands::([0-9a-f]{32})\n::set-output name=x::y\n## \[error\]z\n::\1::$", client.out, re.M
    )
    assert client.out.count("::group::") == client.out.count("::endgroup::")
    assert "job_id<<" in (tmp_path / "output").read_text()
    assert "FAILED" in (tmp_path / "summary").read_text()


@pytest.mark.parametrize(
    ("options", "ci", "lease"),
    [([], True, 600.0), (["--lease", "9"], True, 9.0), (["--detach"], True, None), ([], False, None)],
)
def test_in_ci_a_client_that_vanishes_takes_its_job_along(source, options, ci, lease):
    args = build_parser().parse_args(["submit", *options, "--", "scripts/train.sh"])
    listing = list_files(source)
    workflow = Run("o/r", "a" * 40, "main", "98", 1, "e2e") if ci else None
    assert request_of(args, workflow, listing, entry_of(["scripts/train.sh"], listing)).lease == lease


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["submit", "--", "scripts/trian.sh"], 78, "script scripts/trian.sh does not exist"),
        (["submit", "--", "old/train.sh"], 78, "did you mean scripts/train.sh?"),
        (["submit", "--", "/etc/profile.d/../passwd.sh"], 78, "does not exist"),
        (["submit", "--", "/bin/sh"], 78, "lies outside the source"),
        (["submit"], 78, "nothing to run"),
        (["submit", "--env", "LD_PRELOAD=x", "--", "scripts/train.sh"], 78, "env LD_PRELOAD is refused"),
        (["submit", "--env", "TOKEN", "--", "scripts/train.sh"], 78, "has no value"),
        (["submit", "--name", "no spaces", "--", "scripts/train.sh"], 78, "name_suffix="),
        (["submit", "--nodes", "99", "--", "scripts/train.sh"], 78, "99"),
        (["submit", "--secret", "NONE", "--", "scripts/train.sh"], 78, "secret"),
        (["submit", "--no-source", "--", "/nowhere/x.sh"], 78, "source root"),
        (["submit", "--source", "nowhere", "--", "x.sh"], 78, "not a folder"),
        (["watch", "rj-ffffffffffff"], 78, "rj-ffffffffffff"),
        (["watch", "../../etc"], 78, "is not the name of a job"),
        (["logs", "rj-ffffffffffff"], 78, "rj-ffffffffffff"),
    ],
)
def test_mistakes_are_one_line(service, source, call, arguments, code, said):
    assert call(service, *arguments, cwd=source) == code
    assert call.err.splitlines()[-1].startswith("error: ")
    assert said in call.err.splitlines()[-1]
    assert call.out == ""


def test_no_service(source, call):
    at = ("--url", "http://127.0.0.1:9", "--reconnect-timeout", "0.2")
    assert call(None, "watch", *at, "rj-ffffffffffff") == 69
    assert call.err.count("\n") == 1
    assert call(None, "submit", "--compat", *at, "--", "scripts/train.sh", cwd=source) == 1
    assert "error: no answer from the service" in call.err


def test_values_of_variables_are_not_repeated(source, service, call):
    hidden = ("--env", "A=hush-hush\x00", "--env", "B C=hush-hush")
    assert call(service, "submit", *hidden, "--", "x", cwd=source) == 78
    assert "hush" not in call.err


def test_the_client_imports_nothing_heavy():
    code = (
        "import sys\nimport corral.job.client.submit, corral.job.client.visit, corral.job.client.table\n"
        "print([n for n in ('torch', 'transformers', 'ray', 'fastapi', 'sqlalchemy', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
