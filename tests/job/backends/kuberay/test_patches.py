"""What a request may change of its RayJob, and what nobody may."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.errors import ConfigError
from corral.job.backends.kuberay.manifest import refusal
from corral.job.backends.kuberay.patches import ALLOWED, FORBIDDEN
from corral.job.backends.kuberay.rules import broken
from corral.job.protocol.submit import Resources
from tests.job.backends.kuberay.jobs import container, made, placement, pods, settings
from tests.job.backends.kuberay.strict import needs_schema, pod_problems, problems

HEAD = "/spec/rayClusterSpec/headGroupSpec/template"
WORKER = "/spec/rayClusterSpec/workerGroupSpecs/0/template"
BOX = f"{HEAD}/spec/containers/0"


def patch(path: str, value: Any = None, op: str = "add") -> dict[str, Any]:
    return {"op": op, "path": path} | ({} if op == "remove" else {"value": value})


def both(path: str, value: Any, op: str = "replace") -> list[dict[str, Any]]:
    return [patch(f"{group}/spec/{path}", value, op) for group in (HEAD, WORKER)]


# What the first of such workflows asked for: 64 CPUs, 512Gi, 16 accelerators, 128Gi of shared memory.
REFERENCE = [
    *both("containers/0/resources/limits/cpu", "64"),
    *both("containers/0/resources/limits/memory", "512Gi"),
    *both("containers/0/resources/limits/huawei.com~1Ascend910", "16"),
    *both("containers/0/resources/requests/cpu", 64),
    *both("containers/0/resources/requests/memory", "512Gi"),
    *both("containers/0/resources/requests/huawei.com~1Ascend910", 16),
    *both("volumes/0/emptyDir/sizeLimit", "128Gi"),
]


@needs_schema
@pytest.mark.parametrize("head", ["shared", "separate"])
def test_the_reference_patches_work(head):
    changes = REFERENCE if head == "shared" else [each for each in REFERENCE if "workerGroupSpecs" in each["path"]]
    found = made(2, 16, settings(profile="ascend-a3"), placement(*changes, head=head))
    amounts = {"cpu": "64", "memory": "512Gi", "huawei.com/Ascend910": "16"}
    for pod in pods(found)[0 if head == "shared" else 1 :]:
        assert container(pod)["resources"] == {"limits": amounts, "requests": amounts}
        assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "128Gi"}
    assert problems(found) == []
    assert pod_problems(found) == []


def test_devices_that_nobody_counts_are_refused():
    said = refused(2, 4, *both("containers/0/resources/limits/huawei.com~1Ascend910", "8"),
                   *both("containers/0/resources/requests/huawei.com~1Ascend910", "8"))  # fmt: skip
    assert "head would have 8 huawei.com/Ascend910, and the job asks for 4; say so with --devices" in said
    said = refused(2, 4, *both("containers/0/resources/limits/huawei.com~1ascend-1980", "4", "add"),
                   *both("containers/0/resources/requests/huawei.com~1ascend-1980", "4", "add"))  # fmt: skip
    assert "huawei.com/ascend-1980 of head is not the device of profile ascend-a2 (huawei.com/Ascend910)" in said


@needs_schema
@pytest.mark.parametrize(
    "change",
    [
        patch(f"{WORKER}/spec/nodeSelector", {"zone": "a"}),
        patch(f"{WORKER}/spec/tolerations", [{"key": "a", "operator": "Exists", "tolerationSeconds": 5}]),
        patch(f"{HEAD}/metadata/annotations", {"example.org/a": "b"}),
        patch("/metadata/annotations/example.org~1a", "b"),
        patch(f"{HEAD}/spec/priorityClassName", "high"),
        patch(f"{HEAD}/spec/terminationGracePeriodSeconds", 90),
        patch(f"{BOX}/resources/limits/ephemeral-storage", "10Gi"),
        patch(f"{BOX}/resources/limits/cpu", 128, "replace"),
        patch(f"{WORKER}/spec/volumes/0/emptyDir/sizeLimit", op="remove"),
        patch("/spec/backoffLimit", 0, "test"),
    ],
    ids=lambda change: change["path"][-30:],
)
def test_what_a_patch_may_do(change):
    found = made(place=placement(change))
    assert problems(found) == []
    assert pod_problems(found) == []
    assert broken(found) == []
    assert (found == made()) == (change["op"] == "test")


def refused(nodes: int, devices: int, *changes: dict[str, Any], where: Any = None) -> str:
    said = refusal(Resources(nodes=nodes, accelerators_per_node=devices), placement(*changes), where or settings())
    assert said is not None, changes
    assert "\n" not in said
    return said


HOST = {"name": "x", "hostPath": {"path": "/"}}
HOSTILE = [
    patch(f"{HEAD}/spec/hostPID", True),
    patch(f"{HEAD}/spec/hostNetwork", True),
    patch(f"{HEAD}/spec/serviceAccountName", "admin"),
    patch(f"{HEAD}/spec/automountServiceAccountToken", True, "replace"),
    patch(f"{HEAD}/spec/securityContext/runAsUser", 0, "replace"),
    patch(f"{HEAD}/spec/securityContext", op="remove"),
    patch(f"{BOX}/securityContext/privileged", True),
    patch(f"{BOX}/securityContext", op="remove"),
    patch(f"{BOX}/command", ["sh"]),
    patch(f"{BOX}/env/-", {"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}),
    patch(f"{BOX}/envFrom", [{"secretRef": {"name": "other"}}]),
    patch(f"{BOX}/image", "evil:1", "replace"),
    patch(f"{HEAD}/spec/volumes/-", HOST),
    patch(f"{HEAD}/spec/volumes/0", HOST, "replace"),
    patch(f"{HEAD}/spec/initContainers", [{"name": "i", "image": "i"}]),
    patch(f"{HEAD}/spec/nodeName", "host-1"),
    patch(f"{HEAD}/spec", {}, "replace"),
    patch(HEAD, op="remove"),
    patch("/spec/entrypoint", "sh -c id"),
    patch("/spec/rayClusterSpec/workerGroupSpecs/0/replicas", 100, "replace"),
    patch("/spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus", "1; id", "replace"),
    patch("/spec/shutdownAfterJobFinishes", False, "replace"),
    patch("/metadata/name", "other", "replace"),
    patch("/metadata/namespace", "kube-system"),
    patch("/metadata/labels/corral.dev~1service", "other", "replace"),
    patch("/metadata/annotations/corral.dev~1commit", "0", "replace"),
    patch("/metadata/annotations", {}, "replace"),
    patch("/", {}, "replace"),
    patch(f"{HEAD}/metadata/annotations", {"container.apparmor.security.beta.kubernetes.io/ray-head": "unconfined"}),
    patch(f"{WORKER}/metadata/annotations", {"k8s.v1.cni.cncf.io/networks": "storage"}),
    patch("/metadata/annotations/ray.io~1external-storage-namespace", "other"),
    patch(f"{HEAD}/spec/priorityClassName", "system-node-critical"),
    patch(f"{HEAD}/spec/terminationGracePeriodSeconds", 10**9),
]
# Allowed paths: what is wrong shows in what comes out.
IN_ALLOWED_PATHS = ("annotations", "networks", "storage-namespace", "priorityClassName", "PeriodSeconds")


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: f"{change['op']}-{change['path'][-40:]}")
def test_what_a_patch_may_not_do(change):
    said = refused(2, 4, change)
    assert said.startswith("template_patches")
    if not change["path"].endswith(IN_ALLOWED_PATHS):
        assert f"{change['op']} {change['path']}" in said


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: f"{change['op']}-{change['path'][-40:]}")
def test_not_even_where_every_path_is_allowed(change):
    """The second and third line of defence, without the first."""
    refused(2, 4, change, where=settings(patch_paths=("/metadata", "/spec", "/")))


@pytest.mark.parametrize(
    "value",
    [
        {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "hostPath": "/"},
        {"limits": {"cpu": "64"}, "requests": {"cpu": "64"}, "claims": [{"name": "x"}]},
        {"limits": {"cpu": True}},
        {"limits": {}, "requests": {}},
        [],
        "64",
        None,
        {"limits": {"cpu": "1" * 40}, "requests": {}},
    ],
    ids=str,
)
def test_values_are_looked_into(value):
    refused(2, 4, patch(f"{BOX}/resources", value, "replace"))


def test_snake_case_is_no_way_in():
    where = settings(patch_paths=("/spec",))
    assert "volumes.2.host_path" in refused(
        2, 4, patch(f"{HEAD}/spec/volumes/-", {"name": "x", "host_path": {"path": "/"}}), where=where
    )


def test_a_deep_value_is_refused_before_it_is_walked():
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    assert "nested over 16 deep" in refused(2, 4, patch(f"{HEAD}/spec/tolerations", deep))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (patch(f"{HEAD}/spec/volumes/9/emptyDir/sizeLimit", "1Gi", "replace"), "has no such place"),
        (patch(f"{BOX}/resources/limits/gone", op="remove"), "has no such place"),
        (patch(f"{HEAD}/spec/containers/-/resources", {}), "has no such place"),
        (patch(f"{HEAD}/spec/containers/x/resources", {}), "has no such place"),
        (patch("/spec/backoffLimit", 5, "test"), "has another value"),
        (patch("/spec/gone/~2", 5, "test"), "no JSON pointer"),
        (patch(f"{BOX}/image", "a:1"), "allowed are those under /metadata/annotations"),
        (patch(f"{BOX}/resources/limits/cpu", "1", "replace"), "requests are at most the limits"),
        (patch(f"{HEAD}/spec/volumes/0/emptyDir/sizeLimit", "900Gi", "replace"), "are over the container's memory"),
        (patch(f"{HEAD}/spec/terminationGracePeriodSeconds", "90"), "should be a valid integer"),
    ],
)  # fmt: skip
def test_the_error_says_what_and_where(change, said):
    assert said in refused(2, 4, change)


def test_the_number_of_the_operation_is_named():
    assert refused(2, 4, patch(f"{HEAD}/spec/nodeSelector", {}), patch("/x", 1)).startswith(
        "template_patches 2: add /x"
    )


def test_an_image_may_be_patched_where_paths_and_images_allow_it():
    change = patch(f"{BOX}/image", "registry.example.org/a:2", "replace")
    paths = ("/spec/rayClusterSpec/*/template/spec/containers/*/image",)
    found = made(where=settings(images=("registry.example.org/*",), patch_paths=paths), place=placement(change))
    assert container(pods(found)[0])["image"] == "registry.example.org/a:2"
    assert "is not allowed here" in refused(2, 4, change, where=settings(images=("other/*",), patch_paths=paths))
    assert "is not allowed here" in refused(2, 4, change, where=settings(patch_paths=paths))


def test_plain_variables_may_be_patched_where_paths_allow_it():
    where = settings(patch_paths=("/spec/rayClusterSpec/headGroupSpec/template/spec/containers/0/env",))
    change = patch(f"{BOX}/env/-", {"name": "HF_HOME", "value": "/data"})
    assert {"name": "HF_HOME", "value": "/data"} in container(pods(made(where=where, place=placement(change)))[0])[
        "env"
    ]
    for name in ("LD_PRELOAD", "RAY_ADDRESS", "CORRAL_AGENT_TOKEN", "PATH"):
        refused(2, 4, patch(f"{BOX}/env/-", {"name": name, "value": "/data"}), where=where)
    refused(2, 4, patch(f"{BOX}/env/0", op="remove"), where=where)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.sampled_from(["64", "1Gi", "hostPath", "x", ""]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from([*sorted(FORBIDDEN)[:9], "limits", "requests", "cpu", "key", "emptyDir"]), below
        )
    ),
    max_leaves=6,
)
PATHS = [prefix.replace("*", "0") for prefix in ALLOWED]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "replace", "remove"]),
            st.sampled_from(PATHS),
            st.sampled_from(["", "/-", "/0", "/cpu", "/limits/cpu", "/hostPath", "/x~1y"]),
            VALUES,
        ),
        max_size=3,
    )
)
def test_whatever_is_asked_for_the_pods_may_do_as_little(drawn):
    changes = [patch(path + end, value, op) for op, path, end, value in drawn]
    before = made()
    try:
        found = made(place=placement(*changes))
    except ConfigError as error:
        assert str(error).startswith("template_patches")  # noqa: PT017
        return
    assert broken(found) == []
    for old, new in zip(pods(before), pods(found), strict=True):
        for pod in (old := copy.deepcopy(old), new := copy.deepcopy(new)):
            for key in ("nodeSelector", "tolerations", "priorityClassName", "terminationGracePeriodSeconds"):
                pod.pop(key, None)
            pod["volumes"][0]["emptyDir"].pop("sizeLimit", None)
            pod["volumes"][1]["emptyDir"].pop("sizeLimit", None)
            pod["containers"][0].pop("resources")
        assert old == new
