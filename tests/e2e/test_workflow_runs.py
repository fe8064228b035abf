"""The job of the generated workflow, its steps in order in a bare shell: green, red, and clean after a cancel.

On PATH are curl, jq, git and Python; Corral is the one these tests run with. The service and its jobs are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.cli import main
from tests.e2e.actions import Job, Runner, jobs
from tests.e2e.test_workflow_jobs import git
from tests.e2e.test_workflow_shared import GITHUB, Offered, action_job, reusable_job
from tests.job.e2e.faults import Service, environment, until

TIMES = "deadlines: {queue: 60, start: 60, run: 120, stop: 5}"
CASES = {
    "green": f"name: green\nsummary: ends well\ncommand: [python3, train.py]\n{TIMES}\n",
    "red": f"name: red\nsummary: fails in its code\ncommand: [python3, broken.py]\n{TIMES}\n",
    "long": f"name: long\nsummary: does not end\ncommand: [python3, long.py, REACHED]\n{TIMES}\n",
}
FILES = {
    "train.py": "print('trained')\n",
    "broken.py": "def loss():\n    raise ValueError('the loss is a <b>pear</b>')\n\n\nloss()\n",
    "long.py": "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)\n",
}


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A token for the jobs of one repository, and the file of the service that knows it."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    command = ["serve", "--new-token", "ci", "--token-file", file, "--scopes", "submit,read,cancel"]
    said = subprocess.run(
        ["corral", *command, "--repositories", "team/*"], env=environment(), capture_output=True, text=True, check=True
    )
    return next(word for word in said.stdout.split() if word.startswith("corral_")), file


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, token: tuple[str, Path]) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"), "--token-file", token[1])
    service.http.headers["Authorization"] = f"Bearer {token[0]}"
    try:
        yield service
    finally:
        service.close()


class Project:
    """A repository with three cases, and what GitHub does with its generated workflow."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.reached = root, root / "project", root / "reached"
        (self.folder / "e2e").mkdir(parents=True)
        for name, text in CASES.items():
            (self.folder / "e2e" / f"{name}.yaml").write_text(text.replace("REACHED", str(self.reached)))
        for name, text in FILES.items():
            (self.folder / name).write_text(text)
        git(self.folder, "init")
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-m", "a")

    def run(self, case: str, *options: str, number: int = 1, cancels: bool = False, **secrets: str) -> Job:
        """The job `e2e` of workflow run `number`. cancels: as soon as the command of the case runs."""
        with chdir(self.folder):
            assert main(["e2e", "workflow", f"e2e/{case}.yaml", "--install", "corral --version", *options]) == 0
        job = jobs(self.folder / ".github" / "workflows" / "e2e_multinode.yml")["e2e"]
        for step in job["steps"]:
            if "run" in step:  # nobody waits a minute here for a service that is not there
                step["run"] = step["run"].replace("--retry 12 --retry-delay 5", "--retry 1 --retry-delay 1")
        needs = {"changes": {"result": "success", "outputs": {"run": "true"}}}
        runner = Runner(
            self.root / f"run-{number}", self.folder, GITHUB | {"run_id": str(number)},
            secrets=secrets, cancel=self._when_it_runs if cancels else None,
            tools=() if "--service-url" in options else ("cat",),  # a node needs it
        )  # fmt: skip
        return runner.run("e2e", job, needs)

    def _when_it_runs(self, step: str, process: subprocess.Popen[bytes]) -> bool:
        if step != "Prove":
            return False
        until(lambda: self.reached.exists() or process.poll() is not None, "the command runs")
        return process.poll() is None

    def left(self) -> list[psutil.Process]:
        """Processes that were started by a step or a job of this project."""
        found, mark = [], os.fsencode(self.root)
        for process in psutil.process_iter():
            try:
                facts = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
            except OSError:
                continue
            if any(mark in fact for fact in facts) and process.pid != os.getpid():
                found.append(process)
        return found

    def nothing_left(self) -> None:
        until(lambda: not self.left(), "all processes are gone", 15)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    try:
        yield project
    finally:
        for process in project.left():
            process.kill()


def outcomes(job: Job) -> dict[str, str]:
    return {step.name: step.outcome for step in job.steps}


def listed(service: Service, number: int) -> list[dict[str, Any]]:
    answer = service.http.get("/api/v1/rayjobs", params={"run_id": str(number)})
    found: list[dict[str, Any]] = answer.json()["jobs"]
    return found


def test_green_on_a_service(project, service, token):
    job = project.run("green", "--service-url", service.url, number=1, CORRAL_TOKEN=token[0])
    assert job.result == "success", job.output
    assert set(outcomes(job).values()) == {"success"}
    assert "trained" in job.output
    assert "PASSED" in job.summary
    assert "VERDICT: PASSED green" in job.step("Prove").output
    kept = {Path(path).name for path in job.artifacts}
    assert {"result.json", "report.html", "junit.xml", "console.log", "driver.log"} <= kept
    (only,) = listed(service, 1)
    assert (only["state"], only["repository"]) == ("SUCCEEDED", "team/project")
    assert f"{only['job_id']} already_over" in job.step("Clean up").output
    assert token[0] not in job.output + job.summary
    project.nothing_left()


def test_red_on_a_service(project, service, token):
    """Red with what failed, where, and the lines around it; and clean."""
    job = project.run("red", "--service-url", service.url, number=2, CORRAL_TOKEN=token[0])
    assert job.result == "failure"
    assert job.step("Prove").code == 1  # that of the command
    assert outcomes(job)["Clean up"] == outcomes(job)["Keep the reports"] == "success"
    assert "::error file=broken.py,line=2," in job.step("Prove").output
    assert job.summary.startswith("#")
    for fact in ("FAILED", "red", "ValueError: the loss is a", "broken.py"):
        assert fact in job.summary
    assert "<b>pear</b>" not in job.summary
    assert len(job.summary) < 65_000
    assert "report.html" in {Path(path).name for path in job.artifacts}
    project.nothing_left()


def test_a_cancel_on_a_service(project, service, token):
    job = project.run("long", "--service-url", service.url, number=3, cancels=True, CORRAL_TOKEN=token[0])
    assert job.result == "cancelled"
    assert outcomes(job) == {
        "Check out": "success", "Set up Python": "success", "Install Corral": "success",
        "Wait until the service is ready": "success", "Prove": "cancelled", "Clean up": "success",
        "Keep the reports": "success",
    }  # fmt: skip
    assert job.step("Prove").code == 128 + signal.SIGINT
    (only,) = listed(service, 3)
    assert only["state"] == "CANCELLED"
    service.nothing_left(only["job_id"])
    project.nothing_left()


@pytest.mark.slow
def test_a_client_that_is_killed_on_a_service(project, service, token, monkeypatch):
    """The runner kills what does not end; then it is the clean-up that ends the job, and only of this run."""
    monkeypatch.setattr("tests.e2e.actions.GRACE", ((signal.SIGKILL, 20.0),))
    other = Project(project.root / "other")
    assert other.run("green", "--service-url", service.url, number=5, CORRAL_TOKEN=token[0]).result == "success"
    job = project.run("long", "--service-url", service.url, number=4, cancels=True, CORRAL_TOKEN=token[0])
    assert job.step("Prove").code == -signal.SIGKILL
    assert outcomes(job)["Clean up"] == "success"
    (only,) = listed(service, 4)
    assert only["state"] == "CANCELLED"
    assert f"{only['job_id']} cancelling" in job.step("Clean up").output
    assert [one["state"] for one in listed(service, 5)] == ["SUCCEEDED"]
    service.nothing_left(only["job_id"])
    project.nothing_left()


@pytest.mark.slow
def test_a_service_that_is_not_there(project):
    """Red at the health check, before anything is sent, and the clean-up says loudly that it could not clean."""
    options = ["--service-url", "http://127.0.0.1:9"]
    job = project.run("green", *options)
    assert outcomes(job) == {
        "Check out": "success", "Set up Python": "success", "Install Corral": "success",
        "Wait until the service is ready": "failure", "Prove": "skipped", "Clean up": "failure",
        "Keep the reports": "success",
    }  # fmt: skip
    assert "no answer from the service" in job.step("Clean up").output or "127.0.0.1:9" in job.step("Clean up").output


@pytest.mark.slow
def test_a_token_that_is_not_known(project, service):
    job = project.run("green", "--service-url", service.url, number=6, CORRAL_TOKEN="corral_wrong")
    assert (job.step("Prove").outcome, job.step("Prove").code) == ("failure", 77)
    assert outcomes(job)["Clean up"] == "failure"
    assert "corral_wrong" not in job.output + job.summary


@pytest.mark.slow
def test_local(project):
    job = project.run("green", number=7)
    assert set(outcomes(job).values()) == {"success"}, job.output
    assert "PASSED" in job.summary
    assert "report.html" in {Path(path).name for path in job.artifacts}
    job = project.run("red", number=8)
    assert (job.result, outcomes(job)["Clean up"]) == ("failure", "success")
    assert "ValueError: the loss is a" in job.summary
    project.nothing_left()


@pytest.mark.slow
def test_a_cancel_of_a_local_run(project):
    job = project.run("long", number=9, cancels=True)
    assert (job.result, outcomes(job)["Clean up"]) == ("cancelled", "success")
    assert job.step("Prove").code == 128 + signal.SIGINT
    project.nothing_left()


@pytest.mark.slow
def test_a_local_run_that_is_killed_with_its_service(project, monkeypatch):
    """What GitHub's runner does at last: everything below the step is killed at once, and the job goes on."""
    monkeypatch.setattr("tests.e2e.actions.GRACE", ((signal.SIGKILL, 20.0),))
    monkeypatch.setattr("tests.e2e.actions.WITH_CHILDREN", True)
    job = project.run("long", number=10, cancels=True)
    assert job.step("Prove").code == -signal.SIGKILL
    assert outcomes(job)["Clean up"] == "success", job.step("Clean up").output
    assert "cancelled, as the caller is gone" in job.step("Clean up").output
    project.nothing_left()


def run_offered(project: Project, kind: Offered, **given: str) -> Job:
    job, inputs, secrets = kind({name.replace("_", "-"): value for name, value in given.items()})
    runner = Runner(
        project.root / f"run-{len(list(project.root.glob('run-*')))}", project.folder, GITHUB,
        inputs=inputs, secrets=secrets, tools=("cat",),
    )  # fmt: skip
    return runner.run("job", job)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [action_job, reusable_job])
def test_what_is_offered_on_a_service(project, service, token, kind):
    job = run_offered(project, kind, cases="e2e/green.yaml", service_url=service.url, token=token[0])
    assert job.result == "success", job.output
    assert job.outputs == {"verdict": "PASSED"}
    assert outcomes(job)["Wait until the service is ready"] == "success"
    assert "already_over" in job.step("Clean up").output
    assert "PASSED" in job.summary
    assert "report.html" in {Path(path).name for path in job.artifacts}
    assert token[0] not in job.output + job.summary


@pytest.mark.slow
@pytest.mark.parametrize("kind", [action_job, reusable_job])
def test_what_is_offered_on_local(project, kind):
    job = run_offered(project, kind, cases="e2e/green.yaml\n e2e/red.yaml")
    assert (job.result, job.outputs) == ("failure", {"verdict": "FAILED"}), job.output
    assert outcomes(job)["Clean up"] == "success"
    assert outcomes(job)["Wait until the service is ready"] == "skipped"
    assert "ValueError" in job.summary
    project.nothing_left()
