"""Submissions, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.job.backends.base import Placement
from corral.job.backends.kuberay.manifest import manifest
from corral.job.protocol.submit import Patch, Resources
from corral.job.service.settings import Kubernetes, Nodes, Profile, Settings

ID, OWNER = "rj-0123456789ab-a1", "fedcba987654"
IMAGE = "registry.example/corral:1"
ABOUT = {"repository": "volcengine/verl", "commit": "0" * 40, "run": "1234/1", "name": "ppo"}


def settings(folder: Path | None = None, images: tuple[str, ...] = (), **kubernetes: Any) -> Settings:
    return Settings(
        Path("/data"),
        backend="kuberay",
        kubernetes=Kubernetes(**{"profile": "ascend-a2", "image": IMAGE, **kubernetes}),
        nodes=Nodes(profiles_dir=folder),
        profile=Profile(images=images),
    )


def placement(*patches: Mapping[str, Any], **fields: Any) -> Placement:
    return replace(
        Placement(start=900.0, run=14400.0, about=ABOUT, patches=tuple(Patch.model_validate(each) for each in patches)),
        **fields,
    )


def made(
    nodes: int = 2,
    devices: int = 4,
    where: Settings | None = None,
    place: Placement | None = None,
    name: str = ID,
    **resources: Any,
) -> dict[str, Any]:
    asked = Resources(nodes=nodes, accelerators_per_node=devices, **resources)
    return manifest(name, asked, place or placement(), where or settings(), OWNER)


def pods(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Specs of the pods: the head's, then that of each group of workers."""
    cluster = found["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [group["template"]["spec"] for group in groups]


def container(pod: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def env(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name; a reference as NAME/KEY of the secret."""
    found = {}
    for each in container(pod)["env"]:
        key = each.get("valueFrom", {}).get("secretKeyRef")
        found[each["name"]] = f"{key['name']}/{key['key']}" if key else each["value"]
    return found
