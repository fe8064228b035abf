"""`corral e2e workflow`: what is written for which options, what is refused, and when a file is up to date."""

from __future__ import annotations

import re
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.cli import main
from corral.e2e.case import Case, Deadlines, Need, Parity
from corral.e2e.workflow_text import minutes

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40} # v[\d.]+)")
SMALL = "e2e/small.yaml"  # by its file, which spares reading the cases that come with Corral
CASE = "name: small\nsummary: a small one\ncommand: ['true']\ndeadlines: {queue: 60, start: 60, run: 120, stop: 15}\n"


def read(file: Path) -> dict[Any, Any]:
    document = yaml.load(file.read_text(), yaml.CSafeLoader)
    assert isinstance(document, dict)
    return document


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory: a project with one case of its own."""
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "small.yaml").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(folder: Path, *options: str) -> Path:
    """The workflow of a project in this folder with one case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(CASE)
    with chdir(folder):
        assert main(["e2e", "workflow", "small.yaml", "--out", "e2e_multinode.yml", *options]) == 0
    return folder / "e2e_multinode.yml"


def written(*options: str) -> dict[str, Any]:
    file = Path("e2e_multinode.yml")
    file.unlink(missing_ok=True)
    assert main(["e2e", "workflow", SMALL, "--out", str(file), *options]) == 0
    document = read(file)
    document["on"] = document.pop(True)  # YAML takes `on` for a truth
    return document


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line it is refused with."""
    capsys.readouterr()
    assert main(["e2e", "workflow", *options]) == 78
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


def names(job: dict[str, Any]) -> list[str]:
    return [step["name"] for step in job["steps"]]


def test_corrals_own_workflow_is_up_to_date(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["e2e", "workflow", "--check"]) == 0, capsys.readouterr()
    jobs = read(Path(".github/workflows/e2e_multinode.yml"))["jobs"]
    assert "two-node-ppo --on local" in jobs["e2e"]["steps"][-3]["run"]
    assert jobs["changes"]["steps"][1]["env"]["PATTERNS"] == "**\n"  # every change


def test_without_options(project):
    document = written()
    assert set(document["on"]) == {"push", "pull_request", "merge_group", "workflow_dispatch"}
    assert document["on"]["push"] == {"branches": ["main"]}
    assert document["on"]["pull_request"] is None  # filtered by a job: a required check would wait for ever
    assert document["permissions"] == {}
    assert document["concurrency"]["cancel-in-progress"] == "${{ github.ref != 'refs/heads/main' }}"
    jobs = document["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "changes": {"contents": "read"}, "e2e": {"contents": "read"}, "e2e-verdict": {},
    }  # fmt: skip
    assert {name: job["runs-on"] for name, job in jobs.items()} == dict.fromkeys(jobs, "ubuntu-latest")
    assert names(jobs["e2e"]) == [
        "Check out", "Set up Python", "Install Corral", "Prove", "Clean up", "Keep the reports",
    ]  # fmt: skip
    assert jobs["e2e-verdict"]["if"] == "always()"
    assert "FORK" not in jobs["changes"]["steps"][1]["env"]
    assert all(step.get("with", {}).get("persist-credentials") is False for step in jobs["e2e"]["steps"][:1])
    assert "secrets." not in Path("e2e_multinode.yml").read_text()


def test_on_a_service(project):
    document = written("--service-url", "https://jobs.example.org", "--token-secret", "JOBS")
    job = document["jobs"]["e2e"]
    assert names(job) == [
        "Check out", "Set up Python", "Install Corral", "Wait until the service is ready", "Prove", "Clean up",
        "Keep the reports",
    ]  # fmt: skip
    prove, clean = job["steps"][4:6]
    assert prove["run"] == 'exec corral e2e run e2e/small.yaml --on "${CORRAL_URL}"'
    assert clean["if"] == "always()"
    assert "continue-on-error" not in clean
    assert prove["env"] == clean["env"] == {"CORRAL_TOKEN": "${{ secrets.JOBS }}"}
    assert job["env"] == {"CORRAL_URL": "https://jobs.example.org"}
    assert "FORK" in document["jobs"]["changes"]["steps"][1]["env"]  # no token there, and our network
    assert "corral==" in job["steps"][2]["run"]
    assert "serve" not in job["steps"][2]["run"]


def test_in_a_container_on_a_runner_of_ones_own(project):
    document = written(
        "--image", "registry.example.org/corral@sha256:0", "--container-options", "--dns 10.0.0.2",
        "--runner", "self-hosted", "--runner", "ascend-a2", "--light-runner", "small", "--environment", "cluster",
        "--service-url", "${{ vars.CORRAL_URL }}", "--owner", "team", "--schedule", "17 3 * * *", "--branch", "trunk",
    )  # fmt: skip
    jobs = document["jobs"]
    assert jobs["e2e"]["container"] == {"image": "registry.example.org/corral@sha256:0", "options": "--dns 10.0.0.2"}
    assert jobs["e2e"]["runs-on"] == ["self-hosted", "ascend-a2"]
    assert jobs["e2e"]["environment"] == "cluster"
    assert names(jobs["e2e"])[:3] == ["Check out", "Let git read the checkout", "Wait until the service is ready"]
    assert jobs["e2e"]["env"]["CORRAL_URL"] == "${{ vars.CORRAL_URL }}"
    assert jobs["changes"]["runs-on"] == jobs["e2e-verdict"]["runs-on"] == "small"
    assert jobs["changes"]["if"] == "github.repository_owner == 'team'"
    assert jobs["e2e-verdict"]["if"] == "always() && github.repository_owner == 'team'"
    assert document["on"]["schedule"] == [{"cron": "17 3 * * *"}]
    assert document["on"]["push"] == {"branches": ["trunk"]}


def test_forks(project):
    def refuses(*options: str) -> bool:
        return "FORK" in written(*options)["jobs"]["changes"]["steps"][1]["env"]

    assert not refuses()
    assert refuses("--runner", "self-hosted")
    assert refuses("--forks", "refuse")
    assert not refuses("--runner", "self-hosted", "--forks", "run")


def test_install_and_python(project):
    def steps(*options: str) -> list[str]:
        return names(written(*options)["jobs"]["e2e"])

    assert "Set up Python" not in steps("--python", "none")
    assert written("--python", "3.12")["jobs"]["e2e"]["steps"][1]["with"] == {"python-version": "3.12"}
    job = written("--install", "make venv", "--install", 'echo "${PWD}/.venv/bin" >>"${GITHUB_PATH}"')["jobs"]["e2e"]
    assert job["steps"][2]["run"] == 'make venv\necho "${PWD}/.venv/bin" >>"${GITHUB_PATH}"\n'
    assert "Install Corral" not in steps("--image", "i")
    assert "Install Corral" in steps("--image", "i", "--install", "true")


def test_a_tier_instead_of_names(project):
    Path("out.yml").unlink(missing_ok=True)
    assert main(["e2e", "workflow", "--tier", "pr", "--out", "out.yml"]) == 0
    job = read(Path("out.yml"))["jobs"]["e2e"]
    assert job["steps"][-3]["run"] == "exec corral e2e run --tier pr --on local"
    assert job["name"] == "Prove tier pr"


def test_the_time_out_is_the_sum_of_the_deadlines():
    limits = Deadlines(prepare=300, queue=600, start=60, run=240, stop=60)
    case = Case(name="a", summary="a", command=["x"], deadlines=limits)
    assert minutes([case], local=False) == 10 + 10 + 1 + 4 + 1 + 2  # queue, start, run, stop, collecting, and 10
    assert minutes([case], local=True) == 10 + 1 + 4 + 1 + 2  # nothing waits
    need = case.model_copy(update={"needs": {"m": Need(path="/m"), "d": Need(path="/d")}})
    assert minutes([need], local=True) == 10 + 2 * 5 + 8
    assert minutes([need], local=False) == 10 + 18
    again = case.model_copy(update={"retries": 2})
    assert minutes([again], local=False) == 10 + 3 * 18
    both = case.model_copy(update={"parity": Parity(args=[])})
    assert minutes([both], local=False) == 10 + 2 * 18
    assert minutes([case, both], local=False) == 10 + 3 * 18
    assert minutes([case.model_copy(update={"deadlines": limits.model_copy(update={"run": 241})})], False) == 29


def test_the_time_out_in_the_file(project, capsys):
    assert written()["jobs"]["e2e"]["timeout-minutes"] == 16  # 60 + 120 + 15 + 120 s, and 10 minutes
    assert written("--service-url", "http://s")["jobs"]["e2e"]["timeout-minutes"] == 17
    Path("e2e/small.yaml").write_text(CASE.replace("run: 120", "run: 36000"))
    capsys.readouterr()
    assert written()["jobs"]["e2e"]["timeout-minutes"] == 360
    assert "the deadlines allow 614 minutes, a job on this runner 360" in capsys.readouterr().err
    assert written("--runner", "big")["jobs"]["e2e"]["timeout-minutes"] == 614
    assert "note:" not in capsys.readouterr().err


def test_the_same_again_and_with_other_options(project, capsys):
    file = Path("w/e2e.yml")
    options = ["--out", str(file)]
    first = ["--paths", "a b/**", "!c'd/**", "--owner", "team", "--container-options=--dns 1.2.3.4", "--image", "i"]
    assert main(["e2e", "workflow", SMALL, *options, *first]) == 0
    text = file.read_text()
    assert read(file)["jobs"]["changes"]["steps"][1]["env"]["PATTERNS"].splitlines() == [
        "a b/**", "!c'd/**", "w/e2e.yml", "e2e/small.yaml",
    ]  # fmt: skip
    assert main(["e2e", "workflow", *options, "--check"]) == 0
    assert main(["e2e", "workflow", *options]) == 0
    assert file.read_text() == text
    assert main(["e2e", "workflow", SMALL, *options, "--check"]) == 1
    assert main(["e2e", "workflow", SMALL, *options]) == 0
    assert file.read_text() != text
    assert main(["e2e", "workflow", *options, "--check"]) == 0


def test_a_file_is_stale_when_its_case_has_changed(project, capsys):
    assert main(["e2e", "workflow", SMALL]) == 0
    assert main(["e2e", "workflow", "--check"]) == 0
    Path("e2e/small.yaml").write_text(CASE.replace("run: 120", "run: 1200"))
    capsys.readouterr()
    assert main(["e2e", "workflow", "--check"]) == 1
    shown = capsys.readouterr()
    assert "-    timeout-minutes: 16\n+    timeout-minutes: 34\n" in shown.out
    assert "is not up to date; run `corral e2e workflow`" in shown.err
    assert main(["e2e", "workflow"]) == 0
    assert main(["e2e", "workflow", "--check"]) == 0


def test_a_file_that_was_edited_is_left_alone(project, capsys):
    file = Path(".github/workflows/e2e_multinode.yml")
    assert main(["e2e", "workflow", SMALL]) == 0
    edited = file.read_text().replace("retention-days: 14", "retention-days: 90")
    file.write_text(edited)
    assert "was edited since" in refused(capsys, SMALL, "--owner", "team")
    assert "was edited since" in refused(capsys)
    assert main(["e2e", "workflow", "--check"]) == 1
    assert "was edited" in capsys.readouterr().err
    assert file.read_text() == edited


def test_a_file_of_somebody_else_is_left_alone(project, capsys):
    file = Path(".github/workflows/e2e_multinode.yml")
    file.parent.mkdir(parents=True)
    file.write_text("on: push\n")
    assert "was not written by" in refused(capsys, SMALL)
    assert "name cases" in refused(capsys)
    assert "name cases" in refused(capsys, "--check")
    assert main(["e2e", "workflow", SMALL, "--check"]) == 1
    assert file.read_text() == "on: push\n"


def test_pins_that_somebody_updated_stay(project):
    file = Path(".github/workflows/e2e_multinode.yml")
    assert main(["e2e", "workflow", SMALL]) == 0
    (_, pin), *_ = PIN.findall(file.read_text())
    newer, older = f"{'a' * 40} # v99.0.0", f"{'b' * 40} # v1"
    file.write_text(file.read_text().replace(pin, newer))
    assert main(["e2e", "workflow", "--check"]) == 0
    assert main(["e2e", "workflow", SMALL, "--owner", "team"]) == 0
    assert newer in file.read_text()
    file.write_text(file.read_text().replace(newer, older))
    assert main(["e2e", "workflow", "--check"]) == 1
    assert main(["e2e", "workflow"]) == 0
    assert pin in file.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["other"], "no case is called 'other'"),
        ([SMALL, "--owner", "a b"], "--owner 'a b' is not the name of a GitHub user"),
        ([SMALL, "--owner", "x' || 'y"], "--owner"),
        ([SMALL, "--branch", "a b"], "--branch"),
        ([SMALL, "--schedule", "daily"], "five fields of cron"),
        ([SMALL, "--token-secret", "A }} B"], "--token-secret"),
        ([SMALL, "--python", "3.11'"], "--python"),
        ([SMALL, "--runner", "a\nb"], "control character"),
        ([SMALL, "--runner", ""], "is empty"),
        ([SMALL, "--paths", "a\nb"], "control character"),
        ([SMALL, "--paths", "${{ github.head_ref }}"], "an expression cannot stand here"),
        ([SMALL, "--install", "echo ${{ vars.X }}"], "an expression cannot stand here"),
        ([SMALL, "--runner", "${{ github.head_ref }}"], "not of the form ${{ vars.NAME }}"),
        ([SMALL, "--service-url", "${{ secrets.URL }}"], "not of the form ${{ vars.NAME }}"),
        ([SMALL, "--image", "i:${{ vars.X"], "not of the form ${{ vars.NAME }}"),
        ([SMALL, "--container-options", "--dns 1.1.1.1"], "needs --image"),
        ([SMALL, "--forks", "maybe"], "invalid choice: 'maybe'"),
        (["/tmp/a.yaml"], "cannot read case"),
        ([SMALL, "--out", "a: b.yml"], "without blanks"),
        ([SMALL, "--out", "workflow.txt"], "is called like e2e.yml"),
        (["$(id).yaml"], "cannot read case"),
    ],
)
def test_what_is_refused(project, capsys, options, said):
    assert said in refused(capsys, *options)
    assert not Path(".github").exists()


def test_below_the_root_of_a_repository(project, capsys, monkeypatch):
    (project / ".git").mkdir()
    assert main(["e2e", "workflow", SMALL]) == 0
    (project / "below").mkdir()
    (project / "below" / "small.yaml").write_text(CASE)
    monkeypatch.chdir(project / "below")
    assert f"run this in {project}" in refused(capsys, "small.yaml")
    assert main(["e2e", "workflow", "small.yaml", "--out", "shown.yml"]) == 0


@pytest.mark.parametrize("path", ["/absolute.yaml", "../up.yaml", "with blank.yaml", "$(id).yaml"])
def test_paths_of_cases_that_would_not_be_found(project, capsys, tmp_path, path):
    file = Path(path) if not path.startswith("/") else tmp_path / path[1:]
    file.write_text(CASE)
    assert "by its path in this repository" in refused(capsys, str(file))


def test_it_is_part_of_the_package(tmp_path):
    listed = subprocess.run(["git", "ls-files", "corral/e2e/workflows"], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.split() == ["corral/e2e/workflows/multinode.yml"]
    assert '"workflows/*.yml"' in (ROOT / "pyproject.toml").read_text()
