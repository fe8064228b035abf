"""Each of the operator's rules with a manifest that breaks it, and that one only."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from corral.job.backends.kuberay.rules import CHANGE_RULES, RULES, broken, broken_change
from tests.job.backends.kuberay.jobs import made, settings

GONE = object()
HEAD = "rayClusterSpec.headGroupSpec"
WORKERS = "rayClusterSpec.workerGroupSpecs.0"
BOX = f"{HEAD}.template.spec.containers.0"
ON_SUCCESS = {"policy": "DeleteCluster"}
OTHERS = {"shutdownAfterJobFinishes": GONE, "ttlSecondsAfterFinished": GONE}


def rule(policy: str, seconds: int = 0, **condition: str) -> dict[str, Any]:
    return {"policy": policy, "condition": {**(condition or {"jobStatus": "FAILED"}), "ttlSeconds": seconds}}


def rules(*each: dict[str, Any]) -> dict[str, Any]:
    return OTHERS | {"deletionStrategy": {"deletionRules": list(each)}}


def by_operator(mode: str) -> dict[str, Any]:
    return {"submissionMode": mode, "entrypoint": "x"}


# name of the rule: changes to the spec (a path below spec, or below the manifest with a leading /)
BREAKS: list[tuple[str, dict[str, Any]]] = [
    ("name-length", {"/metadata.name": "r" * 48}),
    ("name-form", {"/metadata.name": "1-rj"}),
    ("name-form", {"/metadata.name": "rj.a"}),
    ("name-form", {"/metadata.name": "rj-"}),
    ("mode-known", by_operator("ManualMode")),
    ("interactive-retries", {"backoffLimit": 1}),
    ("interactive-entrypoint", {"entrypoint": "x"}),
    ("entrypoint", {"submissionMode": "HTTPMode"}),
    ("entrypoint", {"submissionMode": GONE}),
    ("retries", {"backoffLimit": -1, "submissionMode": "HTTPMode", "entrypoint": "x"}),
    ("selector-retries", {"clusterSelector": {"ray.io/cluster": "c"}, "backoffLimit": 2} | by_operator("HTTPMode")),
    ("selector-suspend", {"clusterSelector": {"ray.io/cluster": "c"}, "suspend": True}),
    ("selector-sidecar", {"clusterSelector": {"ray.io/cluster": "c"}} | by_operator("SidecarMode")),
    ("selector-name", {"clusterSelector": {"cluster": "c"}}),
    ("cluster", {"rayClusterSpec": GONE}),
    ("sidecar-template", {"submitterPodTemplate": {"spec": {}}} | by_operator("SidecarMode")),
    ("sidecar-config", {"submitterConfig": {}} | by_operator("SidecarMode")),
    ("sidecar-restart", {f"{HEAD}.template.spec.restartPolicy": "Always"} | by_operator("SidecarMode")),
    ("submitter", {"submitterPodTemplate": {"spec": {}}}),
    ("managed-by", {"managedBy": "me"}),
    ("managed-by", {"rayClusterSpec.managedBy": "me"}),
    ("runtime-env", {"runtimeEnvYAML": "a: [1"}),
    ("runtime-env", {"runtimeEnvYAML": "- a"}),
    ("active-deadline", {"activeDeadlineSeconds": 0}),
    ("active-deadline", {"activeDeadlineSeconds": True}),
    ("start-deadline", {"preRunningDeadlineSeconds": 0}),
    ("ttl", {"ttlSecondsAfterFinished": -1}),
    ("ttl-shutdown", {"shutdownAfterJobFinishes": False}),
    ("suspend-shutdown", OTHERS | {"suspend": True}),
    ("kueue-suspend", {"/metadata.labels": {"kueue.x-k8s.io/queue-name": "q"}}),
    ("deletion-shutdown", {"deletionStrategy": {"deletionRules": [rule("DeleteCluster")]}}),
    ("deletion-kinds", rules(rule("DeleteCluster")) | {"deletionStrategy.onSuccess": ON_SUCCESS}),
    ("deletion-whole", OTHERS | {"deletionStrategy": {"onSuccess": ON_SUCCESS}}),
    ("deletion-whole", OTHERS | {"deletionStrategy": {"onSuccess": ON_SUCCESS, "onFailure": {}}}),
    ("deletion-whole", OTHERS | {"deletionStrategy": {"deletionRules": []}}),
    ("deletion-none", {"deletionStrategy": {"onSuccess": ON_SUCCESS, "onFailure": {"policy": "DeleteNone"}}}),
    ("deletion-selector", rules(rule("DeleteCluster")) | {"clusterSelector": {"ray.io/cluster": "c"}}),
    ("deletion-autoscaling", rules(rule("DeleteWorkers")) | {"rayClusterSpec.enableInTreeAutoscaling": True}),
    (
        "deletion-one-status",
        rules(rule("DeleteSelf", jobStatus="FAILED", jobDeploymentStatus="Failed")),
    ),
    ("deletion-status", OTHERS | {"deletionStrategy": {"deletionRules": [{"policy": "DeleteSelf", "condition": {}}]}}),
    ("deletion-seconds", rules(rule("DeleteSelf", -1))),
    ("deletion-once", rules(rule("DeleteSelf", 1), rule("DeleteSelf", 1))),
    ("deletion-order", rules(rule("DeleteSelf", 1), rule("DeleteCluster", 2))),
    ("driver-cpus", {"entrypointNumCpus": 1, f"{HEAD}.rayStartParams.num-cpus": "0"}),
    ("labels", {"/metadata.labels": {"a": "x" * 64}}),
    ("labels", {f"{WORKERS}.template.metadata.labels": {"-a": "x"}}),
    ("labels", {f"{HEAD}.labels": {"a": "b/c"}}),
    ("containers", {f"{WORKERS}.template.spec.containers": []}),
    ("params-text", {f"{HEAD}.rayStartParams.num-cpus": 4}),
    ("params-shell", {f"{HEAD}.rayStartParams.num-cpus": "4; rm -rf /"}),
    ("params-shell", {f"{WORKERS}.rayStartParams.resources": '{"NPU": 4}'}),
    ("params-shell", {f"{WORKERS}.rayStartParams.resources": '"{\\"$(id)\\": 4}"'}),
    ("params-labels", {f"{HEAD}.rayStartParams.labels": "a=b"}),
    ("resources-once", {f"{HEAD}.resources": {"NPU": "4"}}),
    ("fixed-size", {f"{WORKERS}.minReplicas": 0}),
    ("fixed-size", {f"{WORKERS}.replicas": GONE}),
    ("group-names", {f"{WORKERS}.groupName": "headgroup"}),
    ("group-suspend", {f"{WORKERS}.suspend": True, "rayClusterSpec.enableInTreeAutoscaling": True}),
    ("port-numbers", {f"{BOX}.ports": [{"name": "a", "containerPort": 70000}]}),
    ("port-numbers", {f"{BOX}.ports": [{"name": "a", "containerPort": 1}, {"name": "b", "containerPort": 1}]}),
    ("port-names", {f"{BOX}.ports": [{"name": "sixteen-letters-", "containerPort": 1}]}),
    ("port-names", {f"{BOX}.ports": [{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]}),
    ("ports-agree", {f"{HEAD}.rayStartParams.dashboard-port": "9999"}),
    ("worker-ports", {f"{HEAD}.rayStartParams.min-worker-port": "20000"}),
    (
        "worker-ports",
        {
            f"{HEAD}.rayStartParams.min-worker-port": "6000",
            f"{HEAD}.rayStartParams.max-worker-port": "7000",
            f"{HEAD}.rayStartParams.port": "6379",
        },
    ),
    ("host-network", {f"{HEAD}.template.spec.hostNetwork": True}),
    ("env-once", {f"{BOX}.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
    ("mounts", {f"{BOX}.volumeMounts": [{"name": "gone", "mountPath": "/x"}]}),
    ("mounts", {f"{BOX}.volumeMounts": [{"name": "shm", "mountPath": "/x"}, {"name": "agent", "mountPath": "/x"}]}),
    ("requests", {f"{BOX}.resources.requests.cpu": "65"}),
    ("requests", {f"{BOX}.resources.limits.cpu": "many"}),
    ("requests", {f"{BOX}.resources.limits": {"cpu": "64", "memory": "512Gi", "huawei.com/Ascend910": "8"}}),
    ("memory-dirs", {f"{HEAD}.template.spec.volumes.0.emptyDir.sizeLimit": "513Gi"}),
    ("redis", {f"{BOX}.env": [{"name": "RAY_REDIS_ADDRESS", "value": "r"}]}),
    (
        "fault-tolerance",
        {"rayClusterSpec.gcsFaultToleranceOptions": {"a": 1}, "/metadata.annotations": {"ray.io/ft-enabled": "true"}},
    ),
    ("redis-user", {f"{BOX}.env": [{"name": "REDIS_USERNAME", "value": "r"}]}),
    ("autoscaler-v2", {f"{BOX}.env": [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]}),
    ("token-version", {"rayClusterSpec.authOptions": {"mode": "token"}, "rayClusterSpec.rayVersion": "2.51.1"}),
    ("token-version", {"rayClusterSpec.authOptions": {}, "rayClusterSpec.rayVersion": GONE}),
]
# A name over 47 letters is refused for itself before its cluster's would be.
WITH = {"name-length": {"cluster-name-length"}, "cluster-name-length": {"name-length"}}


def changed(manifest: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(manifest)
    for path, value in changes.items():
        whole = path.removeprefix("/") if path.startswith("/") else f"spec.{path}"
        *way, last = _steps(whole)
        place: Any = found
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if value is GONE:
            place.pop(last, None)
        else:
            place[last] = value
    return found


def _steps(path: str) -> list[str]:
    return path.split(".")


@pytest.mark.parametrize(("name", "changes"), BREAKS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(BREAKS)])
def test_a_manifest_that_breaks_one_rule(name, changes):
    said = {line.partition(":")[0] for line in broken(changed(made(), changes))}
    assert name in said
    assert said <= {name} | WITH.get(name, set())


def test_every_rule_has_its_example():
    named = {rule.name for rule in RULES}
    assert len(named) == len(RULES), "each rule has a name of its own"
    # Since a RayJob's name is the shorter of the two, its cluster's cannot be too long alone.
    assert named - {name for name, _ in BREAKS} == {"cluster-name-length"}
    assert all("\n" not in rule.message and rule.message for rule in RULES)


def test_what_the_operator_takes_breaks_no_rule():
    for changes in (
        rules(rule("DeleteWorkers", 1), rule("DeleteCluster", 2), rule("DeleteSelf", 2)),
        rules(rule("DeleteSelf", jobDeploymentStatus="Failed"), rule("DeleteCluster", jobStatus="SUCCEEDED")),
        OTHERS | {"deletionStrategy": {"onSuccess": ON_SUCCESS, "onFailure": {"policy": "DeleteNone"}}},
        {"clusterSelector": {"ray.io/cluster": "c"}, "rayClusterSpec": GONE} | by_operator("K8sJobMode"),
        {"backoffLimit": 3} | by_operator("K8sJobMode"),
        {"managedBy": "kueue.x-k8s.io/multikueue"},
        {"runtimeEnvYAML": "env_vars: {A: b}"},
    ):
        assert broken(changed(made(), changes)) == []


@pytest.mark.parametrize("manifest", [{}, {"spec": None}, {"metadata": {"name": None}, "spec": {"rayClusterSpec": {}}}])
def test_any_mapping_may_be_asked_about(manifest):
    assert broken(manifest)


@pytest.mark.parametrize("path", ["managedBy", "rayClusterSpec.managedBy"])
def test_a_manager_stays(path):
    before = changed(made(), {path: "ray.io/kuberay-operator"})
    after = changed(made(), {path: "kueue.x-k8s.io/multikueue"})
    (said,) = broken_change(before, after)
    assert said.startswith("immutable-")
    assert broken_change(before, before) == []
    assert broken_change(made(), after) == []
    assert len(CHANGE_RULES) == 3


def test_suspend_may_be_taken_back_and_an_id_written():
    before = made(where=settings(scheduler="kueue", queue="q"))
    assert broken_change(before, changed(before, {"suspend": False, "jobId": "x"})) == []
