"""The manifests of the service: valid, of one piece, and read by the service as they are written."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from corral.job.backends.base import Placement
from corral.job.backends.kuberay.manifest import manifest
from corral.job.backends.profile import profile_of
from corral.job.protocol.submit import Resources
from corral.job.serve_command import add_serve_parser
from corral.job.service.app import openapi
from corral.job.service.options import settings_of
from corral.job.service.settings import Settings
from tests.deploy.manifests import FOLDER, documents, the

ROOT = FOLDER.parents[1]
PROXY = FOLDER / "proxy"
VERSION = "1.37"  # of Kubernetes
SUBMISSION = "rj-0123456789ab-a1"


@pytest.mark.parametrize("folder", [FOLDER, PROXY], ids=lambda path: path.name)
def test_every_file_is_listed_and_every_object_is_valid(folder):
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.yaml") if path.name != "kustomization.yaml")
    for document in documents(folder):
        kubernetes_validate.validate(document, VERSION, strict=True)
    spaces = {one["metadata"]["name"] for one in documents() if one["kind"] == "Namespace"}
    named = {one["metadata"].get("namespace") for one in documents(folder) if one["kind"] != "Namespace"}
    assert named <= spaces


def test_validation_would_find_a_wrong_field():
    deployment = the("Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


def test_what_refers_to_something_finds_it():
    there = {(one["kind"], one["metadata"]["name"]) for one in documents()}
    pod = the("Deployment")["spec"]["template"]
    wanted = {("ServiceAccount", pod["spec"]["serviceAccountName"])}
    for volume in pod["spec"]["volumes"]:
        wanted |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
        wanted |= (
            {("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])}
            if "persistentVolumeClaim" in volume
            else set()
        )
    assert wanted <= there
    mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    for folder in (FOLDER, PROXY):
        for binding in (one for one in documents(folder) if one["kind"] == "RoleBinding"):
            assert the("Role", binding["roleRef"]["name"], folder)["metadata"]["namespace"] == "corral-jobs"
            for subject in binding["subjects"]:
                account = the(subject["kind"], subject["name"])
                assert account["metadata"]["namespace"] == subject["namespace"] == "corral"


def test_one_pod_that_can_change_nothing_but_its_data():
    deployment = the("Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp"}
    paths = openapi()["paths"]
    assert all(container[f"{probe}Probe"]["httpGet"]["path"] in paths for probe in ("startup", "liveness", "readiness"))


def given_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """As the service's pod reads them, from its own command line; profiles lie where we can write."""
    for name in ("CORRAL_DATABASE_URL", "CORRAL_SERVICE_DIR"):
        monkeypatch.delenv(name, raising=False)
    container = the("Deployment")["spec"]["template"]["spec"]["containers"][0]
    volumes = {volume["name"]: volume for volume in the("Deployment")["spec"]["template"]["spec"]["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    for path, volume in places.items():
        if "configMap" in volume:
            (tmp_path / path.lstrip("/")).mkdir(parents=True)
            for name, text in the("ConfigMap", volume["configMap"]["name"])["data"].items():
                (tmp_path / path.lstrip("/") / name).write_text(text.replace("/etc/corral", f"{tmp_path}/etc/corral"))
    parser = argparse.ArgumentParser()
    add_serve_parser(parser.add_subparsers())
    words = [word.replace("/etc/corral", f"{tmp_path}/etc/corral") for word in container["args"]]
    return settings_of(parser.parse_args(words))


def test_the_service_reads_its_settings(tmp_path, monkeypatch):
    settings = given_settings(tmp_path, monkeypatch)
    service, container = the("Service"), the("Deployment")["spec"]["template"]["spec"]["containers"][0]
    name, space = service["metadata"]["name"], service["metadata"]["namespace"]
    (port,) = service["spec"]["ports"]
    assert settings.public_url == f"http://{name}.{space}.svc:{port['port']}"
    assert [settings.port] == [one["containerPort"] for one in container["ports"]]
    assert (settings.backend, str(settings.data_dir), settings.host) == ("kuberay", "/data", "0.0.0.0")
    assert settings.kubernetes.namespace == the("Role")["metadata"]["namespace"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert settings.token_file is not None
    assert mounts[str(settings.token_file.parent).removeprefix(str(tmp_path))] == "tokens"
    assert str(settings.nodes.profiles_dir).removeprefix(str(tmp_path)) in mounts


def test_its_profiles_are_profiles_and_their_images_are_let_in(tmp_path, monkeypatch):
    settings = given_settings(tmp_path, monkeypatch)
    own = [Path(name).stem for name in the("ConfigMap", "corral-profiles")["data"]]
    assert settings.kubernetes.profile in own
    counted = the("ResourceQuota", "corral-jobs")["spec"]["hard"]
    for name in own:
        profile = profile_of(name, "auto", settings)
        assert any(fnmatchcase(profile.image, pattern) for pattern in settings.profile.images), name
        assert (ROOT / f"docker/Dockerfile.{profile.image.rpartition(':')[2]}").is_file()
        assert profile.accelerator is None or f"requests.{profile.accelerator.resource}" in counted
        resources = Resources(nodes=2, accelerators_per_node=8, kind=profile.kind)
        made = manifest(SUBMISSION, resources, Placement(profile=name), settings, "0" * 12)
        assert made["metadata"]["namespace"] == "corral-jobs"


def selected(peer: dict[str, Any], labels: dict[str, str], space: str) -> bool:
    """Whether a peer of a policy in the namespace of the test's choice means a pod of `space` with these labels."""
    spaces = peer.get("namespaceSelector", {}).get("matchLabels", {})
    if spaces and spaces != {"kubernetes.io/metadata.name": space}:
        return False
    chosen = peer.get("podSelector", {})
    exact = all(labels.get(key) == value for key, value in chosen.get("matchLabels", {}).items())
    return exact and all(
        rule["operator"] == "Exists" and rule["key"] in labels for rule in chosen.get("matchExpressions", [])
    )


def opens(rules: list[dict[str, Any]], side: str, labels: dict[str, str], space: str, port: int) -> bool:
    return any(
        any(selected(peer, labels, space) for peer in rule.get(side, []))
        and port in [one["port"] for one in rule.get("ports", [{"port": port}])]
        for rule in rules
    )


def test_the_network_lets_agents_in_and_the_service_to_the_dashboards(tmp_path, monkeypatch):
    settings = given_settings(tmp_path, monkeypatch)
    resources = Resources(nodes=2, accelerators_per_node=2, kind="cpu")
    job = manifest(SUBMISSION, resources, Placement(), settings, "0" * 12)["spec"]["rayClusterSpec"]
    pods = [job["headGroupSpec"]["template"], *(group["template"] for group in job["workerGroupSpecs"])]
    service = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    mine, theirs = the("NetworkPolicy"), the("NetworkPolicy", "jobs")
    assert mine["spec"]["podSelector"]["matchLabels"].items() <= service.items()
    assert theirs["spec"]["podSelector"] == {}
    for labels in (pod["metadata"]["labels"] for pod in pods):
        assert opens(mine["spec"]["ingress"], "from", labels, "corral-jobs", settings.port)
        assert not opens(mine["spec"]["ingress"], "from", {}, "corral-jobs", settings.port)
        assert opens(mine["spec"]["egress"], "to", labels, "corral-jobs", 8265)
        assert opens(theirs["spec"]["ingress"], "from", service, "corral", 8265)
        assert opens(theirs["spec"]["egress"], "to", service, "corral", settings.port)
        assert opens(theirs["spec"]["ingress"], "from", labels, "corral-jobs", 6379)
