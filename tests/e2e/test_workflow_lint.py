"""Every workflow and action, those in this repository and those that are generated, under three linters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.linters import actionlint, shellcheck, zizmor
from tests.e2e.test_workflow import PIN, generate, read

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OWN = [*WORKFLOWS, ROOT / "action.yml"]

VARIANTS = {
    "plain": [],
    "paths": ["--paths", "src/**", "!src/docs/**", "--owner", "team", "--schedule", "17 3 * * *", "--branch", "trunk"],
    "service": ["--service-url", "https://jobs.example.org", "--token-secret", "JOBS"],
    "cluster": [
        "--service-url", "${{ vars.CORRAL_URL }}", "--runner", "self-hosted", "--runner", "ascend-a2",
        "--light-runner", "ubuntu-24.04", "--container-options=--dns 10.0.0.2", "--environment", "cluster",
        "--image", f"ghcr.io/team/image@sha256:{'0' * 64}",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("generated")
    return [generate(folder / name, *options) for name, options in VARIANTS.items()]


@pytest.fixture(scope="module")
def said(generated: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What actionlint says of all of them and of a wrong one; it takes seconds to start."""
    wrong = tmp_path_factory.mktemp("wrong") / "wrong.yml"
    wrong.write_text(
        "on: push\njobs:\n  a:\n    runs-on: nowhere\n    needs: b\n    steps:\n      - run: echo ${{ nothing.x }}\n"
    )
    return actionlint([*WORKFLOWS, *generated, wrong])


def scripts(file: Path) -> list[str]:
    """Every `run` of a workflow or of a composite action."""
    document: dict[str, Any] = read(file)
    jobs = [document["runs"]] if "runs" in document else document["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", []) if "run" in step]


def test_zizmor_has_no_finding(generated):
    assert zizmor([*OWN, ROOT / ".github/dependabot.yml"]) == []
    assert zizmor(generated, persona="pedantic") == []


def test_what_zizmor_is_told_to_ignore():
    """Both for a reason that stands beside them, and nowhere else."""
    found = [line.split("zizmor: ")[1] for file in OWN for line in file.read_text().splitlines() if "zizmor:" in line]
    assert sorted(found) == [
        "ignore[self-repository] every GitHub server knows this form",
        "ignore[unpinned-images] the caller's choice",
    ]


def test_zizmor_sees_what_is_wrong(tmp_path):
    file = tmp_path / "wrong.yml"
    file.write_text(
        "on: pull_request_target\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - uses: actions/checkout@v4\n      - run: echo ${{ github.event.pull_request.title }}\n"
    )
    found = {line.partition(":")[0] for line in zizmor([file])}
    assert {"template-injection", "unpinned-uses", "dangerous-triggers", "artipacked"} <= found


def test_actionlint_has_no_finding(said):
    assert [line for line in said if not line.startswith("wrong.yml:")] == []


def test_actionlint_sees_what_is_wrong(said):
    text = "\n".join(line for line in said if line.startswith("wrong.yml:"))
    assert '"nowhere"' in text
    assert '"nothing"' in text
    assert '"b"' in text


def test_shellcheck_has_no_finding(generated):
    found = [script for file in [*OWN, *generated] for script in scripts(file)]
    assert len(found) > 20
    assert shellcheck("#!/usr/bin/env bash\n" + "\n".join(f"(\n{script}\n)" for script in sorted(set(found)))) == ""


def test_shellcheck_sees_what_is_wrong():
    assert "SC2086" in shellcheck("echo $1\n")


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_no_expression_stands_in_a_script(file):
    assert [script for script in scripts(file) if "${{" in script] == []


def test_pins_are_the_same_everywhere():
    template = ROOT / "corral" / "e2e" / "workflows" / "multinode.yml"
    pins: dict[str, set[str]] = {}
    for file in [template, *OWN]:
        for action, pin in PIN.findall(file.read_text()):
            pins.setdefault(action, set()).add(pin)
    assert set(pins) == {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
    assert {action: len(found) for action, found in pins.items()} == dict.fromkeys(pins, 1), pins


def test_tokens_are_given_to_the_steps_that_need_them_only():
    """A secret is never part of the environment of a whole job, nor of a step that runs somebody else's code."""
    for file in OWN:
        document = read(file)
        for job in document.get("jobs", {}).values():
            assert "secrets" not in str(job.get("env", "")), file
            for step in job.get("steps", []):
                assert "secrets" not in str(step) or step["name"] in ("Prove", "Clean up"), (file, step)
