"""What Corral offers to other repositories: the action and the reusable job; and its own workflow for Ascend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.actions import Runner
from tests.e2e.test_workflow import ROOT, read

GITHUB = {"repository": "team/project", "repository_owner": "team", "event_name": "push", "ref": "refs/heads/main"}
Offered = Callable[[dict[str, str]], tuple[dict[str, Any], dict[str, str], dict[str, str]]]
WORKFLOWS = ROOT / ".github" / "workflows"


def called(document: dict[Any, Any]) -> dict[str, Any]:
    """What `workflow_call` says; YAML takes `on` for a truth."""
    found: dict[str, Any] = document[True]["workflow_call"]
    return found


def action_job(given: dict[str, str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The action as a job, its inputs, and no secrets."""
    document = read(ROOT / "action.yml")
    outputs = {name: output["value"] for name, output in document["outputs"].items()}
    inputs = {name: one["default"] for name, one in document["inputs"].items()} | {"extras": "none"} | given
    return {"steps": document["runs"]["steps"], "outputs": outputs}, inputs, {}


def reusable_job(given: dict[str, str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The job of the reusable workflow, its inputs, and its secrets."""
    document = read(WORKFLOWS / "e2e_reusable.yml")
    inputs = {name: one["default"] for name, one in called(document)["inputs"].items()} | given
    secrets = {"token": inputs.pop("token")} if "token" in inputs else {}
    return document["jobs"]["e2e"], inputs, secrets


@pytest.mark.parametrize("kind", [action_job, reusable_job])
def test_words_of_the_caller_are_one_argument_each(tmp_path, kind):
    """Whatever they hold; shown by a `corral` that prints them."""
    given = {"cases": "a  $(id)\n'b'.yaml ;c", "tier": "p r", "env": "A=x=y\nB=$HOME C=*", "service-url": "http://s/ x"}
    job, inputs, _ = kind(given)
    job["steps"] = [step for step in job["steps"] if step["name"] == "Prove"]
    runner = Runner(tmp_path / "r", tmp_path, GITHUB, inputs=inputs, secrets={"token": ""})
    (tmp_path / "r" / "tools" / "corral").write_text("#!/bin/bash\nprintf '<%s>' \"$@\"\n")
    shown = runner.run("job", job).output
    assert shown.startswith("<e2e><run><a><$(id)><'b'.yaml><;c><--tier><p r><--env=A=x=y><--env=B=$HOME><--env=C=*>")
    assert shown.endswith("<--on><http://s/ x>")
    _, inputs, _ = kind({"cases": "a"})
    runner = Runner(tmp_path / "s", tmp_path, GITHUB, inputs=inputs, secrets={"token": ""})
    (tmp_path / "s" / "tools" / "corral").write_text("#!/bin/bash\nprintf '<%s>' \"$@\"\n")
    assert runner.run("job", job).output == "<e2e><run><a><--on><local>"


def test_ascend_is_off_unless_a_variable_turns_it_on(tmp_path):
    job = read(WORKFLOWS / "e2e_ascend_multinode.yml")["jobs"]["ascend"]
    assert not Runner(tmp_path / "1", tmp_path, GITHUB).wanted(job)
    assert not Runner(tmp_path / "2", tmp_path, GITHUB, variables={"CORRAL_ASCEND": "false"}).wanted(job)
    assert Runner(tmp_path / "3", tmp_path, GITHUB, variables={"CORRAL_ASCEND": "true"}).wanted(job)


def test_ascend_asks_the_reusable_job_for_what_it_knows():
    document = read(WORKFLOWS / "e2e_ascend_multinode.yml")
    job = document["jobs"]["ascend"]
    offered = called(read(WORKFLOWS / "e2e_reusable.yml"))
    assert set(job["with"]) <= set(offered["inputs"])
    assert set(job["secrets"]) <= set(offered["secrets"])
    assert set(document[True]) == {"schedule", "workflow_dispatch"}
    assert document["concurrency"]["cancel-in-progress"] is False


def test_ascend_takes_settings_from_the_start_then_from_variables(tmp_path):
    given = read(WORKFLOWS / "e2e_ascend_multinode.yml")["jobs"]["ascend"]["with"]
    variables = {
        "CORRAL_ASCEND_URL": "https://jobs.example.org", "CORRAL_ASCEND_NETWORK": "--dns 10.0.0.2",
        "CORRAL_ASCEND_IMAGE": "image@sha256:0",
    }  # fmt: skip

    def filled(**inputs: str) -> dict[str, str]:
        names = {name.replace("_", "-"): value for name, value in inputs.items()}
        root = tmp_path / "-".join(["run", *inputs])
        runner = Runner(root, tmp_path, GITHUB, variables=variables, inputs=names)
        return {name: runner.filled(str(value)) for name, value in given.items()}

    scheduled = filled()
    assert scheduled["service-url"] == "https://jobs.example.org"
    assert scheduled["container-options"] == "--dns 10.0.0.2"
    assert scheduled["image"] == "image@sha256:0"
    assert scheduled["runner"] == '["self-hosted", "ascend"]'
    assert scheduled["cases"] == "two-node-ppo"
    by_hand = filled(service_url="http://other", network="--dns 10.0.0.3", runner='["npu"]', cases="a b")
    assert (by_hand["service-url"], by_hand["container-options"]) == ("http://other", "--dns 10.0.0.3")
    assert (by_hand["runner"], by_hand["cases"]) == ('["npu"]', "a b")
