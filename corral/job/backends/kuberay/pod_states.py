"""What the pods of a RayCluster, and the events about them, tell people. Pure functions over objects of the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

CLUSTER, NODE_TYPE = "ray.io/cluster", "ray.io/node-type"
_LONGEST = 300
_OVER = ("Failed", "Succeeded")


def labels_of(thing: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = (thing.get("metadata") or {}).get("labels") or {}
    return found


def name_of(thing: Object) -> str:
    return str((thing.get("metadata") or {}).get("name", "?"))


def uid_of(thing: Object) -> str:
    return str((thing.get("metadata") or {}).get("uid", ""))


def of_cluster(pods: Iterable[Object], cluster: str) -> list[Any]:
    """Pods of a RayCluster by its name, the head first."""
    found = [pod for pod in pods if labels_of(pod).get(CLUSTER) == cluster]
    return sorted(found, key=lambda pod: (labels_of(pod).get(NODE_TYPE) != "head", name_of(pod)))


def head_of(pods: Iterable[Object]) -> Object | None:
    """The head pod that lives; of several the newest, as an old one may still be on its way out."""
    heads = [pod for pod in pods if labels_of(pod).get(NODE_TYPE) == "head" and alive(pod)]
    return max(heads, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def alive(pod: Object) -> bool:
    status = pod.get("status") or {}
    if status.get("phase") in _OVER or (pod.get("metadata") or {}).get("deletionTimestamp"):
        return False
    return not any("terminated" in (one.get("state") or {}) for one in status.get("containerStatuses") or [])


def trouble(pods: Sequence[Object], events: Sequence[Object] = ()) -> str:
    """One line about pods that do not run: the reason Kubernetes gives, in its own words; "" when all run."""
    told: dict[str, list[str]] = {}
    for pod in pods:
        if said := _not_running(pod, [event for event in events if _about(event, pod)]):
            told.setdefault(said, []).append(name_of(pod))
    parts = [f"{_names(names)}: {said}" for said, names in told.items()]
    return cut("; ".join(parts))


def complaint(events: Sequence[Object]) -> str:
    """The newest warning among events; "" when there is none."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    if not warnings:
        return ""
    newest = max(warnings, key=_when)
    return cut(f"{newest.get('reason', 'Warning')}: {' '.join(str(newest.get('message', '')).split())}")


def cut(line: str, longest: int = _LONGEST) -> str:
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _not_running(pod: Object, events: Sequence[Object]) -> str:
    status = pod.get("status") or {}
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "is being deleted"
    if status.get("phase") in _OVER:
        return _said(f"is {status['phase']}", status.get("reason"), status.get("message")) + _exit(status)
    for one in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        state = one.get("state") or {}
        if waiting := state.get("waiting"):
            if waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
                return _said("", waiting.get("reason"), waiting.get("message"))
        elif "terminated" in state and one in (status.get("containerStatuses") or []):
            return "its container ended" + _exit(status)
    if status.get("phase") != "Pending":
        return ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _said("", condition.get("reason"), condition.get("message"))
    return complaint(events) or "is Pending"


def _exit(status: Object) -> str:
    for one in status.get("containerStatuses") or []:
        if ended := (one.get("state") or {}).get("terminated"):
            return f" ({ended.get('reason', 'Error')}, exit code {ended.get('exitCode', '?')})"
    return ""


def _said(begin: str, reason: object, message: object) -> str:
    words = " ".join(str(message or "").split())
    return ": ".join(part for part in (begin, str(reason or ""), words) if part)


def _about(event: Object, pod: Object) -> bool:
    involved = event.get("involvedObject") or {}
    uid = involved.get("uid")
    return involved.get("name") == name_of(pod) and (not uid or uid == uid_of(pod))


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _names(names: Sequence[str]) -> str:
    return f"pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({names[0]} and others)"
