"""The two small jobs of the generated workflow, their steps run for real: what has changed, the check to require."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.actions import Job, Runner, jobs
from tests.e2e.test_workflow import generate

WAYS = ["success", "failure", "cancelled", "skipped"]


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def merged(folder: Path, *changed: str) -> Path:
    """A checkout as GitHub makes it for a pull request: two commits deep, at the merge of branch and request."""
    origin = folder / "origin"
    origin.mkdir(parents=True)
    git(origin, "init")
    (origin / "kept").touch()
    git(origin, "add", ".")
    git(origin, "commit", "-m", "a")
    git(origin, "checkout", "-b", "request")
    for name in changed:
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text("new")
    git(origin, "add", ".")
    git(origin, "commit", "--allow-empty", "-m", "b")
    git(origin, "checkout", "main")
    (origin / "src").mkdir(exist_ok=True)
    (origin / "src" / "of_main.py").touch()  # newer on the branch: not a change of the request
    git(origin, "add", ".")
    git(origin, "commit", "-m", "c")
    git(origin, "merge", "--no-ff", "request", "-m", "merge")
    git(folder, "clone", "--depth", "2", f"file://{origin}", "checkout")
    return folder / "checkout"


@pytest.fixture
def decide(tmp_path: Path) -> Callable[..., Job]:
    """The job `changes` of a workflow with these options, for an event and a checkout."""
    counter = itertools.count()

    def run(checkout: Path, event: str = "pull_request", *options: str, head: str = "team/project") -> Job:
        root = tmp_path / f"run-{next(counter)}"
        file = generate(root, *options)
        request = {"number": 7, "head": {"repo": {"full_name": head}}} if event == "pull_request" else None
        github = {
            "event_name": event, "repository": "team/project", "repository_owner": "team",
            "event": {"pull_request": request},
        }  # fmt: skip
        return Runner(root, checkout, github).run("changes", jobs(file)["changes"])

    return run


@pytest.mark.parametrize(
    ("changed", "patterns", "run"),
    [
        (["src/a.py"], ["src/**"], "true"),
        (["src/deep/er/a.py"], ["src/**"], "true"),
        (["docs/a.md"], ["src/**"], "false"),
        ([], ["src/**"], "false"),
        (["src/docs/a.md"], ["src/**", "!src/docs/**"], "false"),
        (["src/docs/a.md", "src/a.py"], ["!src/docs/**", "src/**"], "true"),
        (["README.md"], ["*.md"], "true"),
        (["docs/README.md"], ["*.md"], "false"),
        (["docs/README.md"], ["**/*.md"], "true"),
        (["a b/$(id)'.py"], ["a b/$(id)'.py"], "true"),
        (["docs/a.md"], ["!docs/**"], "false"),
        (["src/a.py"], ["!docs/**"], "true"),
    ],
)
def test_a_pull_request_is_proved_when_it_changes_what_matters(tmp_path, decide, changed, patterns, run):
    if patterns == ["!docs/**"]:
        patterns = ["**", *patterns]
    job = decide(merged(tmp_path, *changed), "pull_request", "--paths", *patterns)
    assert job.result == "success", job.output
    assert job.outputs["run"] == run, job.output


def test_every_pull_request_without_paths(tmp_path, decide):
    assert decide(merged(tmp_path, "any/thing")).outputs["run"] == "true"


@pytest.mark.parametrize("event", ["push", "schedule", "workflow_dispatch", "merge_group"])
def test_other_events_are_always_proved(tmp_path, decide, event):
    job = decide(merged(tmp_path), event, "--paths", "src/**")
    assert job.outputs == {"run": "true", "why": f"every {event} is proved"}


def test_what_cannot_be_found_out_is_proved(tmp_path, decide):
    checkout = merged(tmp_path, "docs/a.md")
    git(checkout, "checkout", "--orphan", "alone")
    git(checkout, "commit", "--allow-empty", "-m", "no parent")
    assert decide(checkout, "pull_request", "--paths", "src/**").outputs["run"] == "true"


def test_forks(tmp_path, decide):
    checkout = merged(tmp_path, "src/a.py")
    service = ["--service-url", "https://jobs.example.org"]
    job = decide(checkout, "pull_request", *service, head="stranger/project")
    assert job.outputs["run"] == "refused"
    assert "push its commit to a branch of this repository" in job.outputs["why"]
    assert decide(checkout, "pull_request", *service).outputs["run"] == "true"
    assert decide(checkout, "pull_request", head="stranger/project").outputs["run"] == "true"
    assert decide(checkout, "push", *service).outputs["run"] == "true"
    docs = merged(tmp_path / "2", "docs/a.md")
    paths = [*service, "--paths", "src/**"]
    assert decide(docs, "pull_request", *paths, head="stranger/project").outputs["run"] == "false"


def verdict(job: dict[str, Any], root: Path, changes: str, run: str, e2e: str) -> Job:
    needs = {"changes": {"result": changes, "outputs": {"run": run, "why": "because"}}, "e2e": {"result": e2e}}
    return Runner(root, root.parent, {"repository_owner": "team"}).run("verdict", job, needs)


def test_the_required_check_ends_whatever_happened(tmp_path):
    """It runs after every outcome of the others, and is green for two of them."""
    green, required = [], jobs(generate(tmp_path))["e2e-verdict"]
    for number, (changes, run, e2e) in enumerate(itertools.product(WAYS, ["true", "false", "refused", ""], WAYS)):
        job = verdict(required, tmp_path / str(number), changes, run, e2e)
        assert job.result in ("success", "failure")
        assert job.summary.startswith("e2e: ")
        if job.result == "success":
            green.append((changes, run, e2e))
        else:
            assert "::error title=e2e::" in job.output
    assert green == [("success", "true", "success"), ("success", "false", "skipped")]


def test_the_required_check_says_why(tmp_path):
    job = jobs(generate(tmp_path))["e2e-verdict"]
    assert "nothing to prove: because" in verdict(job, tmp_path / "1", "success", "false", "skipped").summary
    assert verdict(job, tmp_path / "2", "success", "refused", "skipped").summary == "e2e: because\n"
    assert "e2e: failure" in verdict(job, tmp_path / "3", "success", "true", "failure").summary


def test_only_for_its_owner(tmp_path):
    for owner, result in (("team", "success"), ("others", "skipped")):
        job = jobs(generate(tmp_path / owner, "--owner", owner))["e2e-verdict"]
        assert verdict(job, tmp_path / owner / "r", "success", "true", "success").result == result


def test_the_proof_starts_only_when_there_is_something_to_prove(tmp_path):
    job: dict[str, Any] = jobs(generate(tmp_path))["e2e"]
    runner = Runner(tmp_path / "r", tmp_path, {})

    def starts(result: str, run: str) -> bool:
        return runner.wanted(job, {"changes": {"result": result, "outputs": {"run": run}}})

    assert starts("success", "true")
    assert not starts("success", "false")
    assert not starts("success", "refused")
    assert not starts("failure", "true")
