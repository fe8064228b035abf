"""The JSON Schema of a case file, for editors and for whoever makes cases by program."""

from __future__ import annotations

from typing import Any

from corral.e2e.case import Case

_FROM_MATRIX = {"type": "string", "pattern": r"^\{[a-z][a-z0-9_]*\}$"}


def schema() -> dict[str, Any]:
    """Of the file, so with its matrix: where a number is wanted, `{name}` of the matrix may stand too."""
    document = Case.model_json_schema()
    _allow_matrix(document)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "Corral end-to-end case"
    document["properties"]["matrix"] = {
        "type": "object",
        "description": "name: [value, ...]; one case for each combination, {name} standing for the value.",
        "propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"},
        "additionalProperties": {"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}},
    }
    name = document["properties"]["name"]
    name.pop("pattern")  # it may hold {name} of the matrix
    return document


def _allow_matrix(part: Any) -> None:
    """In every schema of a number, a truth value or a word of a list, below a part of the document."""
    if isinstance(part, list):
        for item in part:
            _allow_matrix(item)
        return
    if not isinstance(part, dict):
        return
    if "patternProperties" in part:
        part["additionalProperties"] = False  # a name that fits no pattern is a mistake, not a further name
    for key, value in list(part.items()):
        if key in ("properties", "patternProperties", "$defs"):
            for name, below in value.items():
                value[name] = _or_matrix(below)
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            part[key] = _or_matrix(value)
        else:
            _allow_matrix(value)


def _or_matrix(below: dict[str, Any]) -> dict[str, Any]:
    """A schema as it is, or with the placeholder as another possibility; its words for people stay outside."""
    _allow_matrix(below)
    scalar = below.get("type") in ("integer", "number", "boolean") or "enum" in below
    if "anyOf" in below and any(option.get("type") in ("integer", "number") for option in below["anyOf"]):
        below["anyOf"].append(_FROM_MATRIX)
        return below
    if not scalar:
        return below
    words: dict[str, Any] = {key: below.pop(key) for key in ("title", "description", "default") if key in below}
    return {"anyOf": [below, _FROM_MATRIX], **words}
