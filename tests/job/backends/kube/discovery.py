"""What the server can do, said well enough for kubectl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.job.backends.kube.store import KINDS, Kind, Refused

GROUPS = {"rayjobs": "ray.io", "rayclusters": "ray.io", "jobs": "batch"}  # of the others: the core


def named(plural: str) -> Kind:
    """The kind of a plural that this server knows by itself."""
    return Kind(GROUPS.get(plural, ""), "v1", plural)


_WORDS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def document(path: Sequence[str]) -> Any:
    """Raises Refused (404)."""
    groups = sorted(set(GROUPS.values()))
    match list(path):
        case ["version"]:
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.0", "platform": "linux/amd64"}
        case ["healthz"] | ["readyz"] | ["livez"]:
            return b"ok"
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]}
        case ["api", "v1"]:
            return _resources("", "v1")
        case ["apis", group, version] if group in groups:
            return _resources(group, f"{group}/{version}")
    raise Refused(404, "NotFound", "the server could not find the requested resource")


def _group(name: str) -> Any:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resources(group: str, version: str) -> Any:
    found = [
        {
            "name": plural,
            "singularName": single.lower(),
            "namespaced": plural != "namespaces",
            "kind": single,
            "verbs": _WORDS,
        }
        for plural, single in KINDS.items()
        if GROUPS.get(plural, "") == group
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}
