"""A manifest against the schema of RayJob v1, more strictly than an API server: keys that the schema does not know are
problems, not pruned in silence. For every test that looks at manifests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCHEMA = Path(os.environ.get("CORRAL_TEST_DATA", "/nonexistent")) / "kuberay" / "rayjob-v1.schema.json"
needs_schema = pytest.mark.skipif(not SCHEMA.is_file(), reason="needs CORRAL_TEST_DATA/kuberay/rayjob-v1.schema.json")
KUBERNETES = "1.34"
# The schema says no more of an object's own metadata than that it is one.
_METADATA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "generateName", "namespace")}
    | {name: {"type": "object", "additionalProperties": {"type": "string"}} for name in ("labels", "annotations")}
    | {"finalizers": {"type": "array", "items": {"type": "string"}}},
}


@cache
def rayjob_schema() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    found["properties"]["metadata"] = _METADATA
    return found


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(rayjob_schema())


def problems(manifest: Any) -> list[str]:
    """What the schema does not take, and each key that it does not know."""
    wrong = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in _validator().iter_errors(manifest)
    ]
    return wrong + list(unknown(manifest, rayjob_schema()))


def unknown(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Paths of keys without a schema. A mapping whose keys are data (labels) has `additionalProperties`."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from unknown(each, schema.get("items", {}), f"{place}[{index}]")
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, each in value.items():
            below = known.get(key, others)
            if below in (None, False):
                yield f"{place}.{key}: unknown key"
            else:
                yield from unknown(each, {} if below is True else below, f"{place}.{key}")


def pod_templates(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of head, workers and submitter."""
    spec = manifest["spec"]
    yield spec["rayClusterSpec"]["headGroupSpec"]["template"]
    for group in spec["rayClusterSpec"].get("workerGroupSpecs", []):
        yield group["template"]
    if "submitterPodTemplate" in spec:
        yield spec["submitterPodTemplate"]


@cache
def _pod_problem(template: str) -> str:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", **json.loads(template)}
    try:
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)[:500]
    return ""


def pod_problems(manifest: Mapping[str, Any]) -> list[str]:
    """What Kubernetes' own schema does not take of the pods; equal pods are looked at once."""
    found = (_pod_problem(json.dumps(template, sort_keys=True)) for template in pod_templates(manifest))
    return [problem for problem in found if problem]
