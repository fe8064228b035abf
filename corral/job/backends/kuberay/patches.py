"""Changes to a RayJob that a request may ask for: JSON Patch (RFC 6902) within limits.

Three lines of defence, each on its own: the path has to be allowed; the path and the value name nothing that decides
what a pod may do; and what comes out is read anew by the model, keeps the rules, and has the safety of what went in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jsonpatch
import jsonpointer
from pydantic import ValidationError

from corral.errors import ConfigError
from corral.job.backends.kuberay.look import at, containers, groups
from corral.job.backends.kuberay.model import RayJob
from corral.job.backends.kuberay.pods import Asked
from corral.job.backends.kuberay.rules import broken
from corral.job.protocol.submit import Patch

_GROUPS = ("/spec/rayClusterSpec/headGroupSpec", "/spec/rayClusterSpec/workerGroupSpecs/*")
_ALLOWED_IN_GROUPS = (
    "template/metadata/annotations",
    "template/spec/containers/*/resources",
    "template/spec/volumes/*/emptyDir/sizeLimit",
    "template/spec/nodeSelector",
    "template/spec/tolerations",
    "template/spec/priorityClassName",
    "template/spec/terminationGracePeriodSeconds",
)
ALLOWED = ("/metadata/annotations", *(f"{group}/{path}" for group in _GROUPS for path in _ALLOWED_IN_GROUPS))
# What decides who a pod is, what it may do, and what it sees of its host. Never by a patch, whatever is allowed.
FORBIDDEN = frozenset(
    {"hostPath", "hostPID", "hostIPC", "hostNetwork", "hostPort", "hostUsers", "hostAliases", "nodeName"}
    | {"privileged", "securityContext", "capabilities", "allowPrivilegeEscalation", "seccompProfile", "procMount"}
    | {"runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "supplementalGroups", "appArmorProfile", "seLinuxOptions"}
    | {"serviceAccountName", "serviceAccount", "automountServiceAccountToken", "shareProcessNamespace"}
    | {
        "valueFrom",
        "envFrom",
        "secretKeyRef",
        "secretRef",
        "configMapKeyRef",
        "secret",
        "projected",
        "csi",
        "configMap",
    }
    | {"persistentVolumeClaim", "nfs", "iscsi", "ephemeral", "subPathExpr", "volumeDevices"}
    | {"command", "args", "lifecycle", "initContainers", "ephemeralContainers", "livenessProbe", "readinessProbe"}
    | {"entrypoint", "submissionMode", "jobId", "clusterSelector", "managedBy", "ownerReferences", "finalizers"}
)
_DEEPEST = 16
_OWN = "corral.dev/"
# Annotations of these domains switch things: AppArmor and seccomp off, further networks on, Ray's storage elsewhere.
_SWITCHES = ("kubernetes.io", "k8s.io", "k8s.v1.cni.cncf.io", "ray.io", "corral.dev")
_DEVICES = re.compile(r"(huawei\.com/[Aa]scend|nvidia\.com/|amd\.com/gpu|gpu\.intel\.com/)")


def patched(manifest: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The manifest with the placement's patches. Raises ConfigError that names the operation and its path."""
    allowed = asked.settings.kubernetes.patch_paths or ALLOWED
    found = manifest
    for number, patch in enumerate(asked.placement.patches, 1):
        where = f"template_patches {number}: {patch.op} {patch.path}"
        _check(patch, allowed, where)
        found = _applied(found, patch, where)
    try:
        whole = RayJob.read(found).written()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"template_patches: the RayJob would not fit at {place}: {problem['msg']}") from None
    if problems := broken(whole):
        raise ConfigError(f"template_patches: the RayJob would be refused: {'; '.join(problems)}")
    _same(manifest, whole)
    _fits(whole, asked)
    return whole


def _check(patch: Patch, allowed: Sequence[str], where: str) -> None:
    parts = _parts(patch.path, where)
    for key in (*parts, *_keys(patch.value, where)):
        if key in FORBIDDEN:
            raise ConfigError(f"{where}: {key} is not for patches; it is the profile's, or nobody's")
        if key.startswith(_OWN):
            raise ConfigError(f"{where}: {key[:80]} is Corral's own; choose another key")
    if patch.op == "test":
        return
    if not any(_under(parts, _parts(prefix, f"kubernetes.patch_paths {prefix}")) for prefix in allowed):
        raise ConfigError(f"{where}: this path is not allowed here; allowed are those under {', '.join(allowed)}")


def _parts(path: str, where: str) -> list[str]:
    try:
        parts: list[str] = jsonpointer.JsonPointer(path).parts
    except jsonpointer.JsonPointerException:
        raise ConfigError(f"{where}: is no JSON pointer (RFC 6901); write / as ~1 and ~ as ~0 in keys") from None
    return parts


def _under(parts: list[str], prefix: list[str]) -> bool:
    """`*` in a prefix stands for one step, whatever it is."""
    return len(parts) >= len(prefix) and all(want in ("*", have) for have, want in zip(parts, prefix, strict=False))


def _keys(value: Any, where: str) -> Iterator[str]:
    """Every key in a value, however deep."""
    left: list[tuple[Any, int]] = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > _DEEPEST:
            raise ConfigError(f"{where}: the value is nested over {_DEEPEST} deep; patch the parts of it")
        if isinstance(one, dict):
            yield from one
            left += [(each, depth + 1) for each in one.values()]
        elif isinstance(one, list):
            left += [(each, depth + 1) for each in one]


def _applied(manifest: dict[str, Any], patch: Patch, where: str) -> dict[str, Any]:
    operation = patch.model_dump()
    if patch.op == "remove":
        del operation["value"]
    try:
        found: dict[str, Any] = jsonpatch.JsonPatch([operation]).apply(manifest)
    except jsonpatch.JsonPatchTestFailed:
        raise ConfigError(f"{where}: the RayJob has another value there; see --dry-run -o yaml") from None
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError, KeyError, IndexError):
        raise ConfigError(f"{where}: the RayJob has no such place; see --dry-run -o yaml") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: would replace the RayJob as a whole; patch the parts of it")
    return found


def _same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError when what a patch must not touch is not what it was, by whatever way that came about."""
    old, new = _safety(before), _safety(after)
    for place in sorted(old.keys() | new.keys()):
        if old.get(place) != new.get(place):
            raise ConfigError(f"template_patches: {place} would be changed, which is not for patches")


def _safety(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in at(manifest, "spec", {}).items() if key != "rayClusterSpec"}
    meta = at(manifest, "metadata", {})
    found: dict[str, Any] = {"spec": spec, "metadata": {**meta, "annotations": _switches(meta)}}
    found["rayClusterSpec"] = {
        key: value
        for key, value in at(manifest, "spec.rayClusterSpec", {}).items()
        if key not in ("headGroupSpec", "workerGroupSpecs")
    }
    for name, group in groups(manifest):
        outside = {key: value for key, value in group.items() if key != "template"}
        found[f"{name}: group"] = outside
        found[f"{name}: metadata"] = (at(group, "template.metadata.labels"), _switches(at(group, "template.metadata")))
        pod = at(group, "template.spec", {})
        changeable = ("containers", "volumes", "nodeSelector", "tolerations", "affinity", "priorityClassName")
        found[f"{name}: pod"] = {
            key: value for key, value in pod.items() if key not in (*changeable, "terminationGracePeriodSeconds")
        }
        found[f"{name}: volumes"] = [_sizeless(volume) for volume in pod.get("volumes") or []]
        found[f"{name}: containers"] = [_safe_part(container) for container in containers(group)]
    return found


def _switches(meta: Any) -> dict[str, str]:
    notes = at(meta, "annotations", {}).items()
    return {key: text for key, text in notes if "/" in key and key.partition("/")[0].endswith(_SWITCHES)}


def _sizeless(volume: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(volume.get("emptyDir"), dict):
        return volume
    return {**volume, "emptyDir": {key: value for key, value in volume["emptyDir"].items() if key != "sizeLimit"}}


def _safe_part(container: Mapping[str, Any]) -> dict[str, Any]:
    """All but resources, image and plain variables. Variables of ours stay as they are: they are compared by name."""
    fixed = {
        key: value for key, value in container.items() if key not in ("resources", "image", "imagePullPolicy", "env")
    }
    fixed["env"] = [each for each in container.get("env") or [] if "valueFrom" in each or _ours(each["name"])]
    return fixed


def _ours(name: str) -> bool:
    return name.startswith(("RAY_", "CORRAL_", "LD_", "PYTHON")) or name in ("BASH_ENV", "ENV", "PATH")


def _fits(manifest: dict[str, Any], asked: Asked) -> None:
    """Raise ConfigError for images the service does not let in, for devices that nobody would count, and for the
    priorities of Kubernetes' own pods."""
    patterns = asked.settings.profile.images
    accelerator = asked.profile.accelerator
    for name, group in groups(manifest):
        if str(at(group, "template.spec.priorityClassName", "")).startswith("system-"):
            raise ConfigError(f"template_patches: {name} would have a priority of Kubernetes' own pods; choose another")
        for container in containers(group):
            image = container["image"]
            if image != asked.image and not any(fnmatchcase(image, pattern) for pattern in patterns):
                raise ConfigError(f"template_patches: image {image[:80]!r} of {name} is not allowed here; see --image")
            limits = container["resources"]["limits"]
            expected = 0 if name == "head" and asked.placement.head == "separate" else asked.devices
            if accelerator and limits.get(accelerator.resource, "0") != str(expected):
                raise ConfigError(
                    f"template_patches: {name} would have {limits.get(accelerator.resource, '0')} "
                    f"{accelerator.resource}, and the job asks for {expected}; say so with --devices"
                )
            for other in sorted(limits):
                if _DEVICES.match(other) and (accelerator is None or other != accelerator.resource):
                    known = accelerator.resource if accelerator else "none"
                    raise ConfigError(
                        f"template_patches: {other} of {name} is not the device of profile {asked.profile.name} "
                        f"({known}); choose another profile, or set accelerator.resource in one of your own"
                    )
