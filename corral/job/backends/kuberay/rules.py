"""What the operator refuses (or what fails without a word) though the schema of RayJob allows it.

Read from KubeRay v1.7: its validation of RayJob and RayCluster, the CEL rules of the schema (which only an API server
runs), and rules of our own where a manifest would be taken and then not do what it says. Each rule takes any manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from corral.job.backends.kuberay import group_rules as of_groups
from corral.job.backends.kuberay.look import Manifest, at, has, head, mode, params, spec

LONGEST_JOB, LONGEST_CLUSTER = 47, 53
CLUSTER_SUFFIX = len("-x2k9f")  # what the operator adds to the RayJob's name
MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
DELETIONS = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")  # in the order they may happen
OF_CLUSTER = ("DeleteWorkers", "DeleteCluster")
_DNS_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Rule:
    """holds: whether a manifest keeps it. message: one line for the one who wrote the manifest."""

    name: str
    holds: Callable[[Manifest], bool]
    message: str


@dataclass(frozen=True)
class ChangeRule:
    """One of the schema's rules about an update: holds(before, after)."""

    name: str
    holds: Callable[[Manifest, Manifest], bool]
    message: str


def broken(manifest: Manifest) -> list[str]:
    """`name: message` of each rule that the manifest does not keep."""
    return [f"{rule.name}: {rule.message}" for rule in RULES if not rule.holds(manifest)]


def broken_change(before: Manifest, after: Manifest) -> list[str]:
    """`name: message` of each rule that an update does not keep."""
    return [f"{rule.name}: {rule.message}" for rule in CHANGE_RULES if not rule.holds(before, after)]


# Names and modes -----------------------------------------------------------------------------------------------------


def _name(manifest: Manifest) -> str:
    return str(at(manifest, "metadata.name", ""))


def _selects(manifest: Manifest) -> bool:
    return has(manifest, "spec.clusterSelector")


def _selected(manifest: Manifest) -> bool:
    return not _selects(manifest) or bool(spec(manifest)["clusterSelector"].get("ray.io/cluster"))


def _retries(manifest: Manifest) -> bool:
    return bool(at(manifest, "spec.backoffLimit", 0))


def _in(mode_name: str, manifest: Manifest) -> bool:
    return mode(manifest) == mode_name


def _stays(manifest: Manifest) -> bool:
    return str(at(head(manifest), "template.spec.restartPolicy", "Never")) == "Never"


def _managed(manifest: Manifest) -> bool:
    managers = (at(manifest, f"{where}.managedBy") for where in ("spec", "spec.rayClusterSpec"))
    return all(manager is None or manager in MANAGERS for manager in managers)


def _runtime_env(manifest: Manifest) -> bool:
    text = spec(manifest).get("runtimeEnvYAML")
    if not text:
        return True
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False


def _from(least: int, field: str) -> Callable[[Manifest], bool]:
    def holds(manifest: Manifest) -> bool:
        value = spec(manifest).get(field)
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)

    return holds


def _driven(manifest: Manifest) -> bool:
    """A driver that reserves CPUs would go from a head that has none to a worker."""
    return not spec(manifest).get("entrypointNumCpus") or params(head(manifest)).get("num-cpus") != "0"


# Deletion ------------------------------------------------------------------------------------------------------------


def _deletion_rules(manifest: Manifest) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = at(manifest, "spec.deletionStrategy.deletionRules", [])
    return found


def _ends(manifest: Manifest) -> list[Any]:
    """Policies in the older spelling: onSuccess and onFailure."""
    strategy = at(manifest, "spec.deletionStrategy", {})
    return [at(strategy, f"{end}.policy") for end in ("onSuccess", "onFailure") if at(strategy, end) is not None]


def _policies(manifest: Manifest) -> list[Any]:
    return [*_ends(manifest), *(rule.get("policy") for rule in _deletion_rules(manifest))]


def _complete(manifest: Manifest) -> bool:
    ends = _ends(manifest)
    none = at(manifest, "spec.deletionStrategy") is None
    return none or bool(_deletion_rules(manifest)) or (len(ends) == 2 and None not in ends)


def _conditions(holds: Callable[[Mapping[str, Any]], bool]) -> Callable[[Manifest], bool]:
    return lambda manifest: all(holds(rule.get("condition") or {}) for rule in _deletion_rules(manifest))


def _status(condition: Mapping[str, Any]) -> str:
    """One of the two statuses that a condition may name."""
    return str(condition.get("jobStatus") or condition.get("jobDeploymentStatus") or "")


def _waits(manifest: Manifest) -> dict[str, list[tuple[Any, int]]]:
    found: dict[str, list[tuple[Any, int]]] = {}
    for rule in _deletion_rules(manifest):
        condition = rule.get("condition") or {}
        found.setdefault(_status(condition), []).append((rule.get("policy"), condition.get("ttlSeconds", 0)))
    return found


def _once(manifest: Manifest) -> bool:
    return all(len({policy for policy, _ in waits}) == len(waits) for waits in _waits(manifest).values())


def _in_order(manifest: Manifest) -> bool:
    """Workers never later than their cluster, nor that later than the RayJob."""
    for waits in _waits(manifest).values():
        of = dict(waits)
        seconds = [of[policy] for policy in DELETIONS if policy in of]
        if seconds != sorted(seconds):
            return False
    return True


RULES: tuple[Rule, ...] = (
    Rule("name-length", lambda m: 0 < len(_name(m)) <= LONGEST_JOB, f"a RayJob's name has 1 to {LONGEST_JOB} letters"),
    Rule(
        "name-form",
        lambda m: bool(_DNS_1035.fullmatch(_name(m))),
        "a RayJob's name starts with a letter and holds a-z, 0-9 and - only (DNS-1035)",
    ),
    Rule(
        "cluster-name-length",
        lambda m: len(_name(m)) + CLUSTER_SUFFIX <= LONGEST_CLUSTER,
        f"with the operator's suffix the RayCluster's name has over {LONGEST_CLUSTER} letters",
    ),
    Rule("mode-known", lambda m: mode(m) in MODES, f"submissionMode is none of {', '.join(MODES)}"),
    Rule(
        "interactive-retries",
        lambda m: not (_in("InteractiveMode", m) and _retries(m)),
        "InteractiveMode takes no backoffLimit over 0",
    ),
    Rule(
        "interactive-entrypoint",
        lambda m: not (_in("InteractiveMode", m) and has(m, "spec.entrypoint")),
        "in InteractiveMode nobody runs the entrypoint; leave it out",
    ),
    Rule(
        "entrypoint",
        lambda m: _in("InteractiveMode", m) or has(m, "spec.entrypoint"),
        "all modes but InteractiveMode need an entrypoint",
    ),
    Rule("retries", _from(0, "backoffLimit"), "backoffLimit is a number from 0"),
    Rule(
        "selector-retries",
        lambda m: not (_selects(m) and _retries(m)),
        "clusterSelector takes no backoffLimit over 0: each retry is a new cluster",
    ),
    Rule(
        "selector-suspend", lambda m: not (_selects(m) and has(m, "spec.suspend")), "clusterSelector takes no suspend"
    ),
    Rule(
        "selector-sidecar",
        lambda m: not (_selects(m) and _in("SidecarMode", m)),
        "SidecarMode takes no clusterSelector",
    ),
    Rule("selector-name", _selected, "clusterSelector needs ray.io/cluster, the name of the cluster"),
    Rule(
        "cluster",
        lambda m: _selects(m) or has(m, "spec.rayClusterSpec"),
        "one of rayClusterSpec and clusterSelector has to be there",
    ),
    Rule(
        "sidecar-template",
        lambda m: not (_in("SidecarMode", m) and has(m, "spec.submitterPodTemplate")),
        "SidecarMode takes no submitterPodTemplate",
    ),
    Rule(
        "sidecar-config",
        lambda m: not (_in("SidecarMode", m) and at(m, "spec.submitterConfig") is not None),
        "SidecarMode takes no submitterConfig",
    ),
    Rule(
        "sidecar-restart",
        lambda m: not _in("SidecarMode", m) or _stays(m),
        "in SidecarMode the head's restartPolicy is Never",
    ),
    Rule(
        "submitter",
        lambda m: mode(m) not in ("HTTPMode", "InteractiveMode") or not has(m, "spec.submitterPodTemplate"),
        "only K8sJobMode has a submitter's pod; leave submitterPodTemplate out",
    ),
    Rule("managed-by", _managed, f"managedBy is one of {', '.join(MANAGERS)}"),
    Rule("runtime-env", _runtime_env, "runtimeEnvYAML is no YAML mapping"),
    Rule("active-deadline", _from(1, "activeDeadlineSeconds"), "activeDeadlineSeconds is a number over 0"),
    Rule("start-deadline", _from(1, "preRunningDeadlineSeconds"), "preRunningDeadlineSeconds is a number over 0"),
    Rule("ttl", _from(0, "ttlSecondsAfterFinished"), "ttlSecondsAfterFinished is a number from 0"),
    Rule(
        "ttl-shutdown",
        lambda m: not at(m, "spec.ttlSecondsAfterFinished", 0) or has(m, "spec.shutdownAfterJobFinishes"),
        "ttlSecondsAfterFinished means nothing without shutdownAfterJobFinishes",
    ),
    Rule(
        "suspend-shutdown",
        lambda m: not has(m, "spec.suspend") or has(m, "spec.shutdownAfterJobFinishes"),
        "suspend needs shutdownAfterJobFinishes",
    ),
    Rule(
        "kueue-suspend",
        lambda m: (
            "kueue.x-k8s.io/queue-name" not in at(m, "metadata.labels", {})
            or (has(m, "spec.suspend") and has(m, "spec.shutdownAfterJobFinishes"))
        ),
        "a RayJob for Kueue is created with suspend and shutdownAfterJobFinishes",
    ),
    Rule(
        "deletion-shutdown",
        lambda m: not (_deletion_rules(m) and has(m, "spec.shutdownAfterJobFinishes")),
        "deletionRules and shutdownAfterJobFinishes exclude each other",
    ),
    Rule(
        "deletion-kinds",
        lambda m: not (_ends(m) and at(m, "spec.deletionStrategy.deletionRules") is not None),
        "deletionStrategy takes either onSuccess and onFailure, or deletionRules",
    ),
    Rule(
        "deletion-whole",
        _complete,
        "deletionStrategy needs both onSuccess and onFailure, or at least one of deletionRules",
    ),
    Rule(
        "deletion-none",
        lambda m: not (has(m, "spec.shutdownAfterJobFinishes") and "DeleteNone" in _ends(m)),
        "DeleteNone and shutdownAfterJobFinishes exclude each other",
    ),
    Rule(
        "deletion-selector",
        lambda m: not (_selects(m) and any(policy in OF_CLUSTER for policy in _policies(m))),
        "a cluster that clusterSelector names is never deleted; leave DeleteCluster and DeleteWorkers out",
    ),
    Rule(
        "deletion-autoscaling",
        lambda m: not (has(m, "spec.rayClusterSpec.enableInTreeAutoscaling") and "DeleteWorkers" in _policies(m)),
        "DeleteWorkers does not go with autoscaling",
    ),
    Rule(
        "deletion-one-status",
        _conditions(lambda condition: not (condition.get("jobStatus") and condition.get("jobDeploymentStatus"))),
        "a deletion condition names jobStatus or jobDeploymentStatus, not both",
    ),
    Rule(
        "deletion-status",
        _conditions(lambda condition: bool(_status(condition))),
        "a deletion condition has to name jobStatus or jobDeploymentStatus",
    ),
    Rule(
        "deletion-seconds",
        _conditions(lambda condition: condition.get("ttlSeconds", 0) >= 0),
        "ttlSeconds of a deletion condition is a number from 0",
    ),
    Rule("deletion-once", _once, "each deletion policy is given once for a status"),
    Rule(
        "deletion-order",
        _in_order,
        "workers are deleted no later than their cluster, and that no later than the RayJob",
    ),
    Rule("driver-cpus", _driven, "entrypointNumCpus with a head that has none moves the driver to a worker"),
    *(Rule(name, holds, message) for name, holds, message in of_groups.RULES),
)

CHANGE_RULES = tuple(
    ChangeRule(
        f"immutable-{name}",
        lambda before, after, path=path: at(before, path) is None or at(before, path) == at(after, path),  # type: ignore[misc]
        f"{path} cannot be changed",
    )
    for name, path in (
        ("manager", "spec.managedBy"),
        ("cluster-manager", "spec.rayClusterSpec.managedBy"),
        ("gcs-backend", "spec.rayClusterSpec.gcsFaultToleranceOptions.backend"),
    )
)
