"""Looking into any manifest, whole or not: nothing here raises for what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Manifest = Mapping[str, Any]


def at(manifest: Any, path: str, default: Any = None) -> Any:
    """What lies under "a.b.c", the default where it does not go on or is null."""
    for key in path.split("."):
        manifest = manifest.get(key) if isinstance(manifest, Mapping) else None
    return default if manifest is None else manifest


def has(manifest: Manifest, path: str) -> bool:
    """Whether something is set there; False, nothing and empty things are not."""
    return at(manifest, path) not in (None, {}, [], "", False)


def spec(manifest: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = at(manifest, "spec", {})
    return found


def mode(manifest: Manifest) -> str:
    return str(at(manifest, "spec.submissionMode", "K8sJobMode"))


def head(manifest: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = at(manifest, "spec.rayClusterSpec.headGroupSpec", {})
    return found


def groups(manifest: Manifest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, group) of the head and of each group of workers."""
    if group := head(manifest):
        yield "head", group
    for group in at(manifest, "spec.rayClusterSpec.workerGroupSpecs", ()):
        yield str(group.get("groupName", "")), group


def containers(group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = at(group, "template.spec.containers", [])
    return found


def params(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """rayStartParams."""
    found: Mapping[str, Any] = at(group, "rayStartParams", {})
    return found


def env(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of the container that Ray runs in: names, with their values (None: from elsewhere)."""
    first = containers(group)[:1]
    return {each.get("name", ""): each.get("value") for container in first for each in container.get("env") or []}
