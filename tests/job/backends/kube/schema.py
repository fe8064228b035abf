"""What the schema of a RayJob makes of an object: unknown fields are dropped, wrong ones refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.job.backends.kube.store import Kind, Object, Refused


@cache
def _schema() -> Mapping[str, Any] | None:
    path = Path(os.environ.get("CORRAL_TEST_DATA", "/nonexistent")) / "kuberay" / "rayjob-v1.schema.json"
    if not path.is_file():
        return None
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(dict(_schema() or {}))


def check_rayjob(kind: Kind, thing: Object) -> None:
    """As the API server does before it keeps one; nothing where the schema is not at hand. Raises Refused (422)."""
    if kind.plural != "rayjobs" or kind.group != "ray.io":
        return
    schema = _schema()
    if schema is None:
        return
    for name in ("spec", "status"):
        if name in thing:
            thing[name] = _pruned(thing[name], schema["properties"][name])
    for error in _validator().iter_errors(thing):
        where = ".".join(str(part) for part in error.absolute_path)
        raise Refused(
            422, "Invalid", f'RayJob.ray.io "{thing["metadata"]["name"]}" is invalid: {where}: {error.message}'
        )


def _pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    """Only what the schema knows."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return {name: _pruned(part, known[name]) for name, part in value.items() if name in known}
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {name: _pruned(part, schema["additionalProperties"]) for name, part in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [_pruned(part, schema["items"]) for part in value]
    return value
