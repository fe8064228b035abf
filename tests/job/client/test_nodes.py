"""What a job's nodes are like, from the command line to the manifest that a dry run prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from corral.cli import build_parser
from corral.errors import ConfigError
from corral.job.backends.kuberay.manifest import manifest, refusal, to_yaml
from corral.job.client.nodes import nodes_of
from corral.job.service.settings import Kubernetes
from tests.job.client.test_commands import Call, call, source  # noqa: F401  (fixtures)
from tests.job.service.running import Running, running

# A few lines that mean a billion.
LAUGHS = "- &a0 {op: add}\n" + "".join(f"- &a{n} {{value: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
CLUSTER = Kubernetes(profile="ascend-a2", namespace="ci", image="registry.example/corral:ascend")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that would make RayJobs, and starts nothing."""
    folder = tmp_path_factory.mktemp("cluster") / "data"
    with running(folder, backend="kuberay", kubernetes=CLUSTER) as it:
        backend, where = it.runner.backend, it.service.settings
        backend.manifest = lambda name, *asked: to_yaml(manifest(name, *asked, where, "0" * 12))
        backend.refusal = lambda *asked: refusal(*asked, where)
        yield it


def asked(*options: str) -> dict:
    return nodes_of(build_parser().parse_args(["submit", *options, "--", "x"]))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ([], {}),
        (["--nodes", "2"], {"worker_replicas": 2}),
        (["--nodes", "2", "--devices", "4"], {"resources": {"nodes": 2, "accelerators_per_node": 4}}),
        (["--nodes", "2", "--shm", "8Gi"], {"resources": {"nodes": 2, "shm": "8Gi"}}),
        (["--cpu", "64", "--memory", "512Gi"], {"resources": {"cpu": "64", "memory": "512Gi"}}),
        (
            ["--profile", "gpu", "--head", "separate", "--kind", "gpu"],
            {"profile": "gpu", "layout": {"head": "separate"}, "resources": {"kind": "gpu"}},
        ),
    ],
)
def test_only_what_was_asked_for_is_said(options, fields):
    assert asked(*options) == fields


def test_patches_come_from_files_in_order(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.yaml"
    first.write_text(json.dumps([{"op": "remove", "path": "/a"}, {"op": "add", "path": "/b", "value": 1}]))
    second.write_text("template_patches:\n  - {op: test, path: /c, value: null}\n")
    found = asked("--patch", str(first), "--patch", str(second))["template_patches"]
    assert [each["path"] for each in found] == ["/a", "/b", "/c"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"[1", "is neither JSON nor YAML"),
        (b"\xff", "is neither JSON nor YAML"),
        (b"[]", "has to be a list of operations"),
        (b"{}", "has to be a list of operations"),
        (b"[1]", "has to be a list of operations"),
        (b"[" * 900, "is neither JSON nor YAML"),
        (b"#" * (300 << 10), "is over 256 KiB"),
        (b"[{op: add, path: /a, value: 2026-13-45}]", "is neither JSON nor YAML"),
        (b"[{op: add, path: /a, value: 2026-01-02}]", "2026-01-02 has to be a text or a number; put it in quotes"),
        (b"[{op: add, path: /a, value: .nan}]", "nan has to be a text or a number"),
        (b"[{op: add, path: /a, value: {1: a}}]", "key 1 has to be a text"),
        (b"[{op: add, path: /a, value: !!set {a, b}}]", "has to be a text or a number"),
        (b"[{op: add, path: /a, value: &a [*a]}]", "refers to its own parts too often"),
        (LAUGHS.encode(), "refers to its own parts too often"),
    ],
    ids=[
        "none",
        "cut",
        "bytes",
        "empty",
        "mapping",
        "number",
        "deep",
        "large",
        "no-date",
        "date",
        "nan",
        "key",
        "set",
        "circle",
        "laughs",
    ],
)
def test_a_file_that_holds_no_patches(content, said, tmp_path):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        asked("--patch", str(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dry_run_prints_the_manifest_and_nothing_else(cluster, source, call):  # noqa: F811
    arguments = ["--nodes", "2", "--devices", "4", "--head", "separate", "--shm", "64Gi", "--timeout-start", "100"]
    assert call(cluster, "submit", "--dry-run", "-o", "yaml", *arguments, "--", "scripts/train.sh", cwd=source) == 0
    found = yaml.safe_load(call.out)
    assert found["kind"] == "RayJob"
    assert found["metadata"]["namespace"] == "ci"
    assert found["spec"]["preRunningDeadlineSeconds"] == 160
    assert found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2
    pod = found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "64Gi"
    assert call(cluster, "submit", "--dry-run", "-o", "json", *arguments, "--", "scripts/train.sh", cwd=source) == 0
    again = json.loads(call.out)
    again = json.loads(call.out.replace(again["metadata"]["name"], found["metadata"]["name"]))
    assert again == found, "the two differ in the job's random name only"
    assert cluster.store.jobs() == []


def test_deadlines_of_the_profile_hold_where_none_are_asked_for(cluster, source, call):  # noqa: F811
    assert call(cluster, "submit", "--dry-run", "-o", "yaml", "--", "scripts/train.sh", cwd=source) == 0
    assert yaml.safe_load(call.out)["spec"]["preRunningDeadlineSeconds"] == 1800 + 60


def test_patches_reach_the_manifest(cluster, source, call, tmp_path):  # noqa: F811
    patches = tmp_path / "patches.yaml"
    path = "/spec/rayClusterSpec/headGroupSpec/template/spec/nodeSelector"
    patches.write_text(f"- {{op: add, path: {path}, value: {{zone: a}}}}\n")
    line = ["submit", "--dry-run", "-o", "yaml", "--patch", str(patches), "--", "scripts/train.sh"]
    assert call(cluster, *line, cwd=source) == 0
    assert yaml.safe_load(call.out)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"]
    patches.write_text(patches.read_text().replace("nodeSelector", "hostPID"))
    assert call(cluster, *line, cwd=source) == 78
    assert call.out == ""
    assert "hostPID is not for patches" in call.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "yaml"], "add --dry-run"),
        (["--dry-run", "--profile", "nope"], "'nope' is not known here; there are ascend-a2, ascend-a3, cpu, gpu"),
        (["--dry-run", "--profile", "gpu", "--kind", "npu"], "profile gpu is of kind gpu, and the job asks for npu"),
        (["--dry-run", "--profile", "No Name"], "profile: "),
        (["--dry-run", "--cpu", "many"], "resources.cpu: "),
        (["--dry-run", "--shm", "600Gi"], "shm 600Gi is over memory 512Gi"),
    ],
)
def test_mistakes_are_one_line(options, said, cluster, source, call):  # noqa: F811
    assert call(cluster, "submit", *options, "--", "scripts/train.sh", cwd=source) == 78
    assert call.out == ""
    assert said in call.err.splitlines()[-1]


def test_a_service_that_makes_no_manifest_says_so(source, call, tmp_path):  # noqa: F811
    with running(tmp_path / "data") as service:
        service.runner.backend.manifest = lambda *asked: None
        line = ["submit", "--dry-run", "-o", "yaml", "--", "scripts/train.sh"]
        assert call(service, *line, cwd=source) == 78
        assert call.out == ""
        assert "this service makes no manifest" in call.err


def test_profiles_are_listed_and_shown(call: Call, tmp_path: Path):  # noqa: F811
    (tmp_path / "lab.yaml").write_text("extends: gpu\nabout: eight old ones\n")
    assert call(None, "profiles", "--profiles-dir", str(tmp_path)) == 0
    lines = call.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ascend-a2", "npu"], ["ascend-a3", "npu"], ["cpu", "cpu"], ["gpu", "gpu"], ["lab", "gpu"]
    ]  # fmt: skip
    assert lines[-1].endswith("eight old ones")
    assert call(None, "profiles", "lab", "--profiles-dir", str(tmp_path)) == 0
    assert yaml.safe_load(call.out)["accelerator"]["resource"] == "nvidia.com/gpu"
    assert call(None, "profiles", "nope") == 78
