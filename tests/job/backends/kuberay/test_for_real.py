"""From a submission to a verdict through all there is: the service as a process, the manifest, an API server, an
operator that starts real Ray nodes from it, the job on them, its logs and records, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.operator import OperatorSimulator
from tests.job.backends.kube.real import RealContainers
from tests.job.e2e.faults import Place, environment, interrupt, until
from tests.job.e2e.faults import place as service_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STARTED = 240.0  # seconds until Ray nodes are up, on a busy machine


@pytest.fixture(scope="module")
def kube() -> Iterator[FakeKube]:
    with FakeKube() as server, OperatorSimulator(server, RealContainers()):
        yield server


@pytest.fixture(scope="module")
def at(kube: FakeKube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("service")
    config = folder / "service.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "backend": "kuberay",
                "devices": 8,
                "nodes": {"agent_dir": str(folder / "nodes"), "python": sys.executable},
                "kubernetes": {"kubeconfig": str(kube.kubeconfig(folder / "kubeconfig")), "image": "corral:test"},
            }
        )
    )
    with service_place("--config", config) as it:
        yield it


def nothing_left(kube: FakeKube) -> None:
    for plural in ("rayjobs", "rayclusters", "pods", "secrets"):
        until(lambda plural=plural: not kube.objects(plural), f"all {plural} are gone", 60.0)


def test_two_nodes_from_manifest_to_verdict(at: Place, kube: FakeKube) -> None:
    """The command sees both Ray nodes and writes on each; its lines and its exit code come back."""
    at.script("nodes.py", NODES)
    client = at.submit("--nodes", 2, "--devices", 4, "--kind", "cpu", "--timeout-start", 600, script="nodes.py")
    assert client.done(600.0) == 7, client.err[-3000:]
    assert "cluster 2 nodes 8 CPU" in client.lines
    assert client.verdict.startswith("FAILED (user)")
    nothing_left(kube)


def test_ctrl_c_ends_the_job_and_its_cluster(at: Place, kube: FakeKube) -> None:
    at.script("waits.sh", 'touch "$GATES/waits"; trap "echo told; exit 5" TERM; while :; do sleep 0.1; done')
    client = at.submit("--kind", "cpu", "--timeout-start", 600, script="waits.sh")
    at.reached("waits", STARTED)
    interrupt(client)
    assert client.done(120.0) == 130, client.err[-3000:]
    nothing_left(kube)


def test_the_service_is_killed_while_the_job_runs(at: Place, kube: FakeKube) -> None:
    at.script("counts.sh", 'touch "$GATES/c"; until [ -e "$GATES/c.go" ]; do sleep 0.1; done; seq 1 2000; exit 3')
    client = at.submit("--kind", "cpu", "--timeout-start", 600, script="counts.sh")
    at.reached("c", STARTED)
    at.service.kill()
    at.open("c.go")
    kube.wait(lambda: [one for one in kube.objects("rayjobs") if one["status"]["jobDeploymentStatus"] == "Failed"], 120)
    at.service.start()
    assert client.done(300.0) == 3, client.err[-3000:]
    assert client.lines == [str(number) for number in range(1, 2001)]
    nothing_left(kube)


def test_the_two_node_case_trains_and_equals_one_process(at: Place, kube: FakeKube, tmp_path: Path) -> None:
    """`corral e2e run two-node-ppo --on` the service: records, expectations and parity included."""
    command = [sys.executable, "-m", "corral", "e2e", "run", "two-node-ppo", "--on", at.service.url]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs"), "--cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=1500, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "numbers are equal to those of the reference run" in done.stdout
    (result,) = (tmp_path / "runs").glob("two-node-ppo/*/result.json")
    checks = json.loads(result.read_text())["checks"]
    assert len(checks) > 40
    assert all(check["ok"] for check in checks), checks
    nothing_left(kube)


NODES = """
import sys, time
import ray
ray.init(address="auto", log_to_driver=False)
end = time.monotonic() + 60
while len([one for one in ray.nodes() if one["Alive"]]) < 2 and time.monotonic() < end:
    time.sleep(0.2)
alive = [one for one in ray.nodes() if one["Alive"]]
print(f"cluster {len(alive)} nodes {ray.cluster_resources()['CPU']:.0f} CPU", flush=True)
sys.exit(7)
"""
