"""Rules about the head and the groups of workers: (name, whether a manifest keeps it, message). See rules.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from corral.job.backends.kuberay.look import Manifest, at, containers, env, groups, has, head, params
from corral.job.backends.profile import amount

Group = Mapping[str, Any]

RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
PORT_PARAMS = {
    "gcs-server": ("port", 6379),
    "dashboard": ("dashboard-port", 8265),
    "client": ("ray-client-server-port", 10001),
    "metrics": ("metrics-export-port", 8080),
    "agent-http": ("dashboard-agent-listen-port", 52365),
}
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# "{\"NPU\": 4}": the operator writes the value into a shell command as it stands.
_QUOTED = re.compile(r'"\{\\"[A-Za-z0-9_.-]+\\": ?[0-9]+(, ?\\"[A-Za-z0-9_.-]+\\": ?[0-9]+)*\}"')
_PLAIN = re.compile(r"[A-Za-z0-9._:/=,@+-]*")


def _each(holds: Callable[[Group], bool]) -> Callable[[Manifest], bool]:
    return lambda manifest: all(holds(group) for _, group in groups(manifest))


def _labels(manifest: Manifest) -> bool:
    places = [at(manifest, "metadata.labels", {})]
    for _, group in groups(manifest):
        places += [at(group, "template.metadata.labels", {}), at(group, "labels", {})]
    return all(
        _LABEL_KEY.fullmatch(str(key)) and isinstance(value, str) and _LABEL_VALUE.fullmatch(value)
        for labels in places
        for key, value in labels.items()
    )


def _containers(group: Group) -> bool:
    return bool(containers(group))


def _param_texts(group: Group) -> bool:
    return all(isinstance(value, str) for value in params(group).values())


def _param_safe(group: Group) -> bool:
    return all(_PLAIN.fullmatch(str(text)) or _QUOTED.fullmatch(str(text)) for text in params(group).values())


def _param_labels(group: Group) -> bool:
    return "labels" not in params(group)


def _resources_once(group: Group) -> bool:
    return not (at(group, "resources") and any(params(group).get(key) for key in RESOURCE_PARAMS))


def _fixed(manifest: Manifest) -> bool:
    for group in at(manifest, "spec.rayClusterSpec.workerGroupSpecs", ()):
        sizes = [group.get(key) for key in ("replicas", "minReplicas", "maxReplicas")]
        if sizes[0] is None or sizes != [sizes[0]] * 3 or sizes[0] < 1:
            return False
    return True


def _group_names(manifest: Manifest) -> bool:
    titles = [group.get("groupName") for group in at(manifest, "spec.rayClusterSpec.workerGroupSpecs", ())]
    return len(set(titles)) == len(titles) and "headgroup" not in titles


def _suspended(manifest: Manifest) -> bool:
    workers = at(manifest, "spec.rayClusterSpec.workerGroupSpecs", ())
    scales = has(manifest, "spec.rayClusterSpec.enableInTreeAutoscaling")
    return not (scales and any(group.get("suspend") for group in workers))


def _ports(group: Group) -> list[Mapping[str, Any]]:
    return [port for container in containers(group) for port in container.get("ports") or []]


def _port_numbers(group: Group) -> bool:
    numbers = [port.get("containerPort") for port in _ports(group)]
    return all(isinstance(n, int) and 0 < n < 65536 for n in numbers) and len(set(numbers)) == len(numbers)


def _port_names(group: Group) -> bool:
    titles = [port.get("name") for port in _ports(group)]
    return all(isinstance(t, str) and _PORT_NAME.fullmatch(t) for t in titles) and len(set(titles)) == len(titles)


def _ports_agree(group: Group) -> bool:
    declared = {port.get("name"): str(port.get("containerPort")) for port in _ports(group)}
    return all(
        declared[name] == str(params(group).get(option, usual))
        for name, (option, usual) in PORT_PARAMS.items()
        if name in declared
    )


def _worker_ports(group: Group) -> bool:
    low, high = (str(params(group).get(f"{end}-worker-port", "")) for end in ("min", "max"))
    if not low and not high:
        return True
    if not (low.isdigit() and high.isdigit()) or int(low) >= int(high):
        return False
    others = [
        int(str(value))
        for option, value in params(group).items()
        if (option == "port" or option.endswith("-port")) and "-worker-" not in option and str(value).isdigit()
    ]
    return not any(int(low) <= port <= int(high) for port in others)


def _host_network(group: Group) -> bool:
    pod = at(group, "template.spec", {})
    if not pod.get("hostNetwork"):
        return True
    return pod.get("dnsPolicy") == "ClusterFirstWithHostNet" and "min-worker-port" in params(group)


def _env_once(group: Group) -> bool:
    titles = [[each.get("name") for each in container.get("env") or []] for container in containers(group)]
    return all(len(set(found)) == len(found) for found in titles)


def _mounts(group: Group) -> bool:
    volumes = [volume.get("name") for volume in at(group, "template.spec.volumes", [])]
    mounts = [mount for container in containers(group) for mount in container.get("volumeMounts") or []]
    paths = [mount.get("mountPath") for mount in mounts]
    known = all(mount.get("name") in volumes for mount in mounts)
    return known and len(set(volumes)) == len(volumes) and len(set(paths)) == len(paths)


def _amount(quantity: Any) -> Decimal | None:
    try:
        return amount(str(quantity))
    except ValueError:
        return None


def _requests(group: Group) -> bool:
    """At most the limits; the same for what cannot be shared, which is named with a slash."""
    for container in containers(group):
        asked, most = (at(container, f"resources.{what}", {}) for what in ("requests", "limits"))
        for name in asked:
            low, high = _amount(asked[name]), _amount(most.get(name, asked[name]))
            if low is None or high is None or low > high or ("/" in name and low != high):
                return False
        if any("/" in name and asked and name not in asked for name in most):
            return False
    return True


def _memory_dirs(group: Group) -> bool:
    """Folders in memory count as memory of the container that writes to them."""
    volumes = at(group, "template.spec.volumes", [])
    sizes = [at(v, "emptyDir.sizeLimit") for v in volumes if at(v, "emptyDir.medium") == "Memory"]
    held = [_amount(size) for size in sizes if size is not None]
    limits = [_amount(limit) for c in containers(group)[:1] if (limit := at(c, "resources.limits.memory")) is not None]
    if None in held or None in limits:
        return False
    return not limits or sum(size for size in held if size is not None) <= (limits[0] or 0)


def _redis(manifest: Manifest) -> bool:
    address = "RAY_REDIS_ADDRESS" in env(head(manifest))
    return not address or has(manifest, "spec.rayClusterSpec.gcsFaultToleranceOptions")


def _fault_tolerance(manifest: Manifest) -> bool:
    if not has(manifest, "spec.rayClusterSpec.gcsFaultToleranceOptions"):
        return True
    notes = at(manifest, "metadata.annotations", {})
    return (
        "ray.io/ft-enabled" not in notes
        and "ray.io/external-storage-namespace" not in notes
        and not {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} & set(env(head(manifest)))
        and not params(head(manifest)).get("redis-password")
    )


def _redis_user(manifest: Manifest) -> bool:
    return "REDIS_USERNAME" not in env(head(manifest)) and not params(head(manifest)).get("redis-username")


def _autoscaler(manifest: Manifest) -> bool:
    asked = env(head(manifest)).get("RAY_enable_autoscaler_v2") in ("1", "true")
    return not asked or has(manifest, "spec.rayClusterSpec.enableInTreeAutoscaling")


def _token(manifest: Manifest) -> bool:
    if at(manifest, "spec.rayClusterSpec.authOptions") is None:
        return True
    if at(manifest, "spec.rayClusterSpec.authOptions.mode", "token") != "token":
        return True
    parts = re.match(r"(\d+)\.(\d+)", str(at(manifest, "spec.rayClusterSpec.rayVersion", "")))
    return parts is not None and (int(parts[1]), int(parts[2])) >= (2, 52)


RULES: tuple[tuple[str, Callable[[Manifest], bool], str], ...] = (
    ("labels", _labels, "a label is not what Kubernetes takes: 63 characters, A-Z, a-z, 0-9, _ . and - inside"),
    ("containers", _each(_containers), "a group has no container"),
    ("params-text", _each(_param_texts), "values of rayStartParams are texts; put numbers in quotes"),
    (
        "params-shell",
        _each(_param_safe),
        "a value of rayStartParams would be read by a shell, and holds more than it may",
    ),
    ("params-labels", _each(_param_labels), "rayStartParams takes no labels; use the group's own"),
    (
        "resources-once",
        _each(_resources_once),
        "resources are in rayStartParams or in the group's resources, not in both",
    ),
    ("fixed-size", _fixed, "replicas, minReplicas and maxReplicas are one number over 0: a job has exactly N nodes"),
    ("group-names", _group_names, "groups of workers have names of their own, and none is called headgroup"),
    ("group-suspend", _suspended, "a group cannot be suspended with autoscaling"),
    ("port-numbers", _each(_port_numbers), "container ports are 1 to 65535, each once in a pod"),
    ("port-names", _each(_port_names), "names of ports have 1 to 15 of a-z, 0-9 and -, each once in a pod"),
    (
        "ports-agree",
        _each(_ports_agree),
        "a declared port is not the one in rayStartParams; services would lead nowhere",
    ),
    (
        "worker-ports",
        _each(_worker_ports),
        "min-worker-port to max-worker-port is no range, or another port lies in it",
    ),
    ("host-network", _each(_host_network), "hostNetwork needs dnsPolicy ClusterFirstWithHostNet and a block of ports"),
    ("env-once", _each(_env_once), "a variable is given twice in one container"),
    ("mounts", _each(_mounts), "a volume is mounted that is not there, or two have one name or one path"),
    ("requests", _each(_requests), "requests are at most the limits, and the same where the resource cannot be shared"),
    (
        "memory-dirs",
        _each(_memory_dirs),
        "folders in memory (/dev/shm) are over the container's memory, which they use",
    ),
    ("redis", _redis, "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions"),
    (
        "fault-tolerance",
        _fault_tolerance,
        "gcsFaultToleranceOptions takes no second setting of it in env or annotations",
    ),
    ("redis-user", _redis_user, "the Redis user is given in gcsFaultToleranceOptions only"),
    ("autoscaler-v2", _autoscaler, "RAY_enable_autoscaler_v2 needs enableInTreeAutoscaling"),
    ("token-version", _token, "token authentication needs rayVersion, 2.52 or later"),
)
