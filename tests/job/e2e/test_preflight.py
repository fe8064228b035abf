"""Jobs whose nodes are checked first, from `corral submit` to the verdict."""

from __future__ import annotations

import json
import socket

import pytest

from tests.job.e2e.faults import Place, interrupt, place, until

HANGING = "import os, time; open(os.environ['GATES'] + '/checking', 'w').close(); time.sleep(600)"


@pytest.fixture(scope="module")
def at():
    with place("--devices", 2) as it:
        it.script("job.sh", 'echo "runs on ${CORRAL_JOB_NODES}"')
        (it.source / "shadow").mkdir()
        (it.source / "shadow" / "psutil.py").write_text(HANGING)
        yield it


def happened(at: Place, job: str) -> list[str]:
    """States and checks in order."""
    events = at.service.events(job)
    return [event.get("status", "checks") for event in events if event["type"] in ("status", "preflight")]


def test_two_nodes_that_are_fit(at):
    client = at.submit("--nodes", 2, "--devices", 1, "--kind", "cpu", "--preflight", "--need", "job.sh")
    assert client.done() == 0, client.err
    assert client.lines == ["runs on 2"]
    assert "-- preflight: " in client.err
    states = happened(at, client.job_id)
    assert states.index("PREFLIGHT") < states.index("checks") < states.index("COLLECTING")
    left = json.loads((at.service.attempt(client.job_id) / "preflight.json").read_text())
    assert [node["name"] for node in left["nodes"]] == ["node-0", "node-1"]
    checks = {(each["check"], each["node"]) for each in left["findings"] if each["ok"]}
    assert checks >= {
        (check, node) for check in ("source", "script", "packages", "connect", "clock") for node in (0, 1)
    }
    at.service.nothing_left(client.job_id)


@pytest.mark.slow
def test_two_nodes_of_which_one_is_not(at):
    """Both are on this machine, so what is not there is so for both, and a mistake of who asked."""
    client = at.submit("--nodes", 2, "--devices", 1, "--kind", "cpu", "--preflight", "--need", "/no/such/data")
    assert client.done() == 78
    assert client.verdict.startswith(
        "FAILED (config): paths: expected /no/such/data on every node, found No such file or directory; name a path "
        "that every node has; the command never started; job rj-"
    )
    assert client.lines == []
    assert "RUNNING" not in happened(at, client.job_id)
    (event,) = [event for event in at.service.events(client.job_id) if event["type"] == "preflight"]
    assert (event["ok"], event["failed"], event["findings"][0]["check"]) == (False, 1, "paths")
    at.service.nothing_left(client.job_id)


def test_a_port_that_is_taken(at):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        client = at.submit("--preflight", "--env", f"MASTER_PORT={port}")
        assert client.done() == 75
    assert client.verdict.startswith(f"FAILED (infra): node-0: ports: expected port {port} free, found Address already")
    assert "RUNNING" not in happened(at, client.job_id)


def test_a_script_that_is_missing_takes_no_device(at):
    """Refused by the client before anything is sent, and by the service for a client that does not look."""
    client = at.submit("--preflight", script="absent.sh")
    assert client.done() == 78
    assert "script absent.sh does not exist" in client.err
    sent = at.submit("--preflight")
    assert sent.done() == 0
    before = len(at.service.http.get("/api/v1/rayjobs").json()["jobs"])
    (bundle,) = (at.service.data / "bundles").rglob("*.tar.gz")
    digest = bundle.name.removesuffix(".tar.gz")
    answer = at.service.http.post(
        "/api/v1/rayjobs", json={"script": "absent.sh", "bundle": digest, "preflight": {}, "name_suffix": "x"}
    )
    assert answer.status_code == 422
    assert "script 'absent.sh' is not in the bundle" in answer.json()["error"]
    assert len(at.service.http.get("/api/v1/rayjobs").json()["jobs"]) == before


@pytest.mark.slow
def test_ctrl_c_while_the_nodes_are_checked(at):
    client = at.submit("--preflight", "--env", f"PYTHONPATH={at.source / 'shadow'}")
    at.reached("checking")
    until(lambda: at.service.state(client.job_id) == "PREFLIGHT", "it is checked")
    interrupt(client)
    assert client.done() == 130
    assert client.verdict.startswith("CANCELLED ")
    at.service.nothing_left(client.job_id)


def test_needs_without_checks_are_a_mistake(at):
    client = at.submit("--need", "/data")
    assert client.done() == 78
    assert "--need /data is looked at by the checks of --preflight" in client.err
