"""The RayJob of a submission: what the schemas take, and what it says."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as settings_of_test
from hypothesis import strategies as st

from corral.errors import ConfigError
from corral.job.backends.kuberay.look import at
from corral.job.backends.kuberay.manifest import label, refusal, to_yaml
from corral.job.backends.kuberay.model import Metadata, RayJob
from corral.job.backends.kuberay.rules import broken
from corral.job.backends.profile import profile_names
from corral.job.protocol.submit import Resources
from tests.job.backends.kuberay.jobs import ABOUT, ID, OWNER, container, env, made, placement, pods, settings
from tests.job.backends.kuberay.strict import needs_schema, pod_problems, problems

PROFILES = profile_names(None)
MODES = ("InteractiveMode", "K8sJobMode", "HTTPMode", "SidecarMode")
SCHEDULERS = (
    ("none", None),
    ("volcano", None),
    ("volcano", "q"),
    ("kueue", "q"),
    ("yunikorn", None),
    ("yunikorn", "q"),
)
OWN = """
extends: ascend-a2
accelerator: {resource: huawei.com/ascend-1980}
host_network: true
docker_runtime: false
mounts:
  - {path: /data, claim: models, sub_path: a/b}
  - {path: /out, claim: out, read_only: false}
runtime_class: ascend
node_selector: {accelerator: huawei-Ascend910}
tolerations: [{key: npu, operator: Equal, value: "yes", effect: NoExecute}]
pod_labels: {ring-controller.atlas: ascend-910b}
pod_annotations: {example.org/note: "a: b"}
priority_class: high
image_pull_secrets: [registry]
run_as_group: 1000
fs_group: 1000
ray_start_params: {object-store-memory: "1000000000"}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path


@needs_schema
@pytest.mark.parametrize("profile", [*PROFILES, "own"])
def test_every_manifest_fits_the_schemas_and_the_rules(profile, own):
    everything = itertools.product(SCHEDULERS, MODES, ("shared", "separate"), (1, 3))
    for (scheduler, queue), mode, head, nodes in everything:
        where = settings(own, profile=profile, scheduler=scheduler, queue=queue, submission=mode, namespace="ci",
                         secrets={"HF_TOKEN": "hugging-face/token"}, service_account="jobs")  # fmt: skip
        place = placement(head=head, secrets=("HF_TOKEN", "ELSEWHERE"))
        found = made(nodes, 4, where, place)
        case = (scheduler, queue, mode, head, nodes)
        assert problems(found) == [], case
        assert pod_problems(found) == [], case
        assert broken(found) == [], case
        assert RayJob.read(found).written() == found, case


@pytest.mark.parametrize("profile", PROFILES)
def test_yaml_for_people_is_the_same_manifest(profile):
    found = made(where=settings(profile=profile))
    assert yaml.safe_load(to_yaml(found)) == found


@needs_schema
def test_the_strict_walk_sees_what_the_schema_lets_through():
    found = made()
    found["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Never"
    found["spec"]["tllSeconds"] = 5
    found["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 4
    said = problems(found)
    assert len(said) == 3
    assert ".spec.tllSeconds: unknown key" in said


@pytest.mark.parametrize(
    ("profile", "head", "counts"),
    [
        ("cpu", "shared", [{"CPU": 4}, {"CPU": 4}]),
        ("gpu", "shared", [{"GPU": 4}, {"GPU": 4}]),
        ("ascend-a2", "shared", [{"NPU": 4}, {"NPU": 4}]),
        ("cpu", "separate", [{}, {"CPU": 4}]),
        ("gpu", "separate", [{}, {"GPU": 4}]),
        ("ascend-a3", "separate", [{}, {"NPU": 4}]),
    ],
)
def test_what_ray_is_told_the_nodes_have(profile, head, counts):
    found = made(2, 4, settings(profile=profile), placement(head=head))
    cluster = found["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2 if head == "separate" else 1] * 3
    told = []
    for params in (cluster["headGroupSpec"]["rayStartParams"], group["rayStartParams"]):
        (resources,) = shlex.split(params.get("resources", "{}"))  # a shell takes the outer quotes away
        devices = json.loads(resources) if "resources" in params else {}
        devices |= {"GPU": int(params["num-gpus"])} if params.get("num-gpus", "0") != "0" else {}
        devices |= {"CPU": int(params["num-cpus"])} if profile == "cpu" and params["num-cpus"] != "0" else {}
        told.append(devices)
    assert told == counts
    if head == "separate":
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("head", ["shared", "separate"])
def test_devices_are_asked_for_where_they_are_used(head):
    found = made(3, 8, place=placement(head=head))
    first, others = pods(found)
    asked = [container(pod)["resources"]["limits"].get("huawei.com/Ascend910") for pod in (first, others)]
    assert asked == (["8", "8"] if head == "shared" else [None, "8"])
    assert all(
        container(pod)["resources"]["limits"] == container(pod)["resources"]["requests"] for pod in (first, others)
    )


def test_one_node_has_no_workers():
    assert "workerGroupSpecs" not in made(1)["spec"]["rayClusterSpec"]


def test_a_job_is_found_by_its_labels_and_its_facts_are_whole_in_annotations():
    meta = made(place=placement(about=ABOUT | {"run": "x/" + "9" * 90}))["metadata"]
    assert meta["name"] == ID
    assert meta["labels"]["app.kubernetes.io/managed-by"] == "corral"
    assert meta["labels"]["corral.dev/service"] == OWNER
    assert meta["labels"]["corral.dev/submission"] == ID
    assert meta["labels"]["corral.dev/repository"] == "volcengine-verl"
    assert len(meta["labels"]["corral.dev/run"]) == 63
    assert meta["annotations"]["corral.dev/repository"] == "volcengine/verl"
    assert meta["annotations"]["corral.dev/run"] == "x/" + "9" * 90
    assert meta["annotations"]["corral.dev/nodes"] == "2 x 4 NPU, head on the first node"


def test_deadlines_leave_the_service_time_to_say_more_itself():
    spec = made()["spec"]
    assert spec["preRunningDeadlineSeconds"] == 900 + 60
    assert spec["activeDeadlineSeconds"] == 900 + 14400 + 60 + 600
    unlimited = made(place=placement(run=None))["spec"]
    assert "activeDeadlineSeconds" not in unlimited
    assert "preRunningDeadlineSeconds" in unlimited
    assert "preRunningDeadlineSeconds" not in made(place=placement(start=None))["spec"]
    assert made(place=placement(start=0.2))["spec"]["preRunningDeadlineSeconds"] == 61


def test_secrets_are_references_and_only_the_head_has_the_agents():
    where = settings(secrets={"HF_TOKEN": "hugging-face/token", "UNUSED": "a/b"})
    first, others = pods(made(where=where, place=placement(secrets=("HF_TOKEN", "FROM_THE_SERVICE"))))
    own = {"CORRAL_AGENT_TOKEN", "CORRAL_AGENT_BOARDING"}
    assert {name: env(first)[name] for name in own} == {name: f"{ID}/{name}" for name in own}
    assert not own & env(others).keys()
    for pod in (first, others):
        assert env(pod)["HF_TOKEN"] == "hugging-face/token"
        assert not {"UNUSED", "FROM_THE_SERVICE"} & env(pod).keys()
        assert env(pod)["RAY_JOB_STOP_WAIT_TIME_S"] == "10"
        assert env(pod)["RAY_DEDUP_LOGS"] == "0"
        assert env(pod)["HCCL_CONNECT_TIMEOUT"] == "600"


@pytest.mark.parametrize("mode", MODES)
def test_pods_may_do_little(mode, own):
    found = made(where=settings(own, submission=mode, profile="own"))
    templates = pods(found)
    if "submitterPodTemplate" in found["spec"]:
        templates.append(found["spec"]["submitterPodTemplate"]["spec"])
    for pod in templates:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container(pod)["securityContext"]
        assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert pod["restartPolicy"] == "Never"
    assert not re.search(r"privileged|hostPID|hostIPC", json.dumps(found))


@pytest.mark.parametrize("mode", MODES)
def test_who_starts_the_entrypoint(mode):
    spec = made(where=settings(submission=mode))["spec"]
    assert spec["submissionMode"] == mode
    assert spec["backoffLimit"] == 0
    assert spec["shutdownAfterJobFinishes"] is True
    if mode == "InteractiveMode":
        assert not {"entrypoint", "jobId", "metadata"} & spec.keys()
    else:
        assert spec["entrypoint"] == "python3 -m corral.job.agent.join"
        assert spec["jobId"] == ID
    assert ("submitterPodTemplate" in spec) == (mode == "K8sJobMode")


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("K8sJobMode", "fails with the pod that submitted it"),
        ("HTTPMode", "runs it again"),
        ("SidecarMode", "ends when a busy head"),
    ],
)
def test_a_mode_in_which_the_operator_submits_comes_with_what_is_lost(mode, lost):
    text = to_yaml(made(where=settings(submission=mode)))
    first = text.splitlines()[0]
    assert first.startswith(f"# {mode}: the job may start before Ray has all of its nodes and devices, and ")
    assert lost in first
    assert yaml.safe_load(text)["spec"]["submissionMode"] == mode


def test_the_usual_mode_comes_without_a_warning():
    assert not to_yaml(made()).startswith("#")


@pytest.mark.parametrize(
    ("scheduler", "queue", "labels", "suspended"),
    [
        ("none", None, {}, None),
        ("volcano", "q", {"volcano.sh/queue-name": "q"}, None),
        ("kueue", "q", {"kueue.x-k8s.io/queue-name": "q"}, True),
        (
            "yunikorn",
            "root.q",
            {
                "yunikorn.apache.org/app-id": ID,
                "yunikorn.apache.org/queue": "root.q",
                "ray.io/gang-scheduling-enabled": "true",
            },
            None,
        ),
    ],
)
def test_who_admits_all_pods_at_once(scheduler, queue, labels, suspended):
    found = made(where=settings(scheduler=scheduler, queue=queue))
    there = {key: text for key, text in found["metadata"]["labels"].items() if not key.startswith(("corral", "app."))}
    assert there == labels
    assert found["spec"].get("suspend") is suspended


def test_nodes_of_a_job_are_on_hosts_of_their_own(tmp_path):
    where = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    first, others = pods(made())
    for pod in (first, others):
        (term,) = at(pod, where)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"]["corral.dev/submission"] == ID
    head, _ = pods(made(place=placement(head="separate")))
    assert "affinity" not in head, "a head without devices may share a host"
    (tmp_path / "close.yaml").write_text("extends: ascend-a2\nspread: 'off'\n")
    assert "affinity" not in pods(made(where=settings(tmp_path, profile="close")))[1]
    preferred = at(pods(made(where=settings(profile="cpu")))[1], where.replace("required", "preferred"))
    assert preferred[0]["weight"] == 100


def test_the_drivers_files_are_mounted_where_the_runtime_does_not(own):
    found = made(where=settings(own, profile="own"), place=placement(head="separate"))
    head, nodes = pods(found)
    driver = "/usr/local/Ascend/driver"
    assert driver not in [mount["mountPath"] for mount in container(head)["volumeMounts"]]
    (mount,) = [mount for mount in container(nodes)["volumeMounts"] if mount["mountPath"] == driver]
    assert mount["readOnly"] is True
    assert driver in [at(volume, "hostPath.path") for volume in nodes["volumes"]]
    assert "hostPath" not in json.dumps(made())


def test_shared_memory_and_the_agents_folder():
    for pod in pods(made(shm="64Gi")):
        assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]
        assert {"name": "agent", "mountPath": "/tmp/corral-jobs"} in container(pod)["volumeMounts"]


def test_jobs_on_the_hosts_network_have_ports_of_their_own(own):
    where = settings(own, profile="own")
    taken: dict[int, list[int]] = {}
    for number in range(40):
        found = made(where=where, place=placement(head="separate"), name=f"rj-{number:012x}-a1")
        cluster = found["spec"]["rayClusterSpec"]
        ports: list[int] = []
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            params, pod = group["rayStartParams"], group["template"]["spec"]
            assert pod["hostNetwork"] is True
            assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
            single = [int(value) for option, value in params.items()
                      if option == "port" or (option.endswith("-port") and "worker" not in option)]  # fmt: skip
            declared = [port["containerPort"] for port in container(pod)["ports"]]
            assert sorted(declared) == sorted(single), "a scheduler keeps pods apart that declare the same ports"
            ports += [*single, *range(int(params["min-worker-port"]), int(params["max-worker-port"]) + 1)]
        assert min(ports) >= 20000
        assert max(ports) <= 29999
        assert len(set(ports)) == len(ports), "a head without devices may share a host with a node"
        taken[min(ports)] = ports
    assert len(taken) > 10
    everything = [port for block in taken.values() for port in block]
    assert len(everything) == len(set(everything)), "blocks do not overlap"


def test_a_block_of_ports_has_one_for_each_process(tmp_path):
    (tmp_path / "few.yaml").write_text("extends: ascend-a2\nhost_network: true\nports: {block: 200}\n")
    said = refusal(Resources(), placement(), settings(tmp_path, profile="few"))
    assert "leaves a node 90 ports for processes of Ray, and 64 CPUs may have" in str(said)


def test_facts_do_not_pass_for_ownership():
    meta = made(place=placement(about={"service": "other", "submission": "other"}))["metadata"]
    assert (meta["labels"]["corral.dev/service"], meta["labels"]["corral.dev/submission"]) == (OWNER, ID)


def test_clusters_that_ask_for_a_token_find_it_beside_the_agents(tmp_path):
    auth = made(where=settings(token_file=tmp_path / "token"))["spec"]["rayClusterSpec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": ID}
    assert made()["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "disabled"}


@pytest.mark.parametrize(
    ("asked", "where", "fields", "said"),
    [
        ({"accelerators_per_node": 9}, {}, {}, "9 devices a node asked for, and profile ascend-a2 has 8"),
        ({"shm": "600Gi"}, {}, {}, "shm 600Gi is over memory 512Gi"),
        ({"memory": "1Gi"}, {}, {}, "shm 128Gi is over memory 1Gi"),
        ({"cpu": "0"}, {}, {}, "each has to be over 0"),
        ({"cpu": "2", "accelerators_per_node": 4}, {"profile": "cpu"}, {}, "4 devices are 4 CPUs"),
        ({}, {"profile": "tpu"}, {}, "'tpu' is not known here; there are ascend-a2, ascend-a3, cpu, gpu"),
        ({}, {}, {"profile": "nope"}, "'nope' is not known here"),
        ({"kind": "gpu"}, {}, {"profile": "cpu"}, "of kind cpu, and the job asks for gpu"),
        ({"kind": "npu"}, {"profile": "cpu"}, {}, "name a profile (--profile): ascend-a2, ascend-a3"),
        ({}, {"scheduler": "kueue"}, {}, "needs kubernetes.queue"),
        ({}, {"queue": "q"}, {}, "needs a kubernetes.scheduler"),
        ({}, {"queue": "a b", "scheduler": "volcano"}, {}, "cannot be a label's value"),
        ({}, {"secrets": {"T": "no-key"}}, {"secrets": ("T",)}, "T is to be NAME/KEY"),
        ({}, {"secrets": {"OMP_NUM_THREADS": "a/b"}}, {"secrets": ("OMP_NUM_THREADS",)}, "keep one of them"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(asked, where, fields, said):
    problem = refusal(Resources(**asked), placement(**fields), settings(**where))
    assert problem is not None
    assert said in problem
    assert "\n" not in problem


def test_what_can_be_is_not_refused():
    assert refusal(Resources(nodes=2, accelerators_per_node=8, kind="npu"), placement(), settings()) is None
    assert refusal(Resources(kind="gpu"), placement(), settings()) is None, "there is one profile of kind gpu"


@pytest.mark.parametrize(
    ("asked", "of_profile", "of_service", "found"),
    [
        ("a:1", "b:1", "c:1", "a:1"),
        ("", "b:1", "c:1", "b:1"),
        ("", "", "c:1", "c:1"),
        ("registry.example.org/a/b@sha256:" + "0" * 64, "b:1", "", "registry.example.org/a/b@sha256:" + "0" * 64),
        ("", "", "", None),
    ],
)
def test_whose_image_it_is(asked, of_profile, of_service, found, tmp_path):
    (tmp_path / "lab.yaml").write_text(f"extends: cpu\nimage: '{of_profile}'\n")
    where = settings(tmp_path, profile="lab", image=of_service)
    if found is None:
        assert "profile lab names no image" in str(refusal(Resources(), placement(), where))
    else:
        assert {container(pod)["image"] for pod in pods(made(where=where, place=placement(image=asked)))} == {found}


@given(st.text(max_size=200))
def test_any_text_becomes_a_label(text):
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", label(text))


@needs_schema
@settings_of_test(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["repository", "commit", "run", "name"]), st.text(max_size=300)),
    st.from_regex(r"rj-[0-9a-f]{12}-a[1-9][0-9]{0,3}", fullmatch=True),
    st.integers(1, 1024),
    st.integers(1, 64),
)
def test_odd_facts_make_whole_manifests(about, name, nodes, devices):
    found = made(nodes, devices, settings(profile="cpu"), placement(about=about), name)
    assert problems(found) == []
    assert broken(found) == []
    assert yaml.safe_load(to_yaml(found)) == found
    assert all(found["metadata"]["annotations"][f"corral.dev/{key}"] == text for key, text in about.items())


@given(st.text(max_size=80) | st.from_regex(r"[a-z0-9-]{0,60}", fullmatch=True))
def test_an_odd_name_is_refused_or_fits(name):
    found = RayJob.read(made(1, 1)).model_copy(update={"metadata": Metadata(name=name)}).written()
    fits = re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", name) is not None
    assert fits == (broken(found) == [])


def test_a_name_that_is_none_makes_no_manifest():
    with pytest.raises(ConfigError, match="name-form"):
        made(name="1")
