"""What `corral submit` says of a job's nodes, and how it prints what a cluster would be given for them."""

from __future__ import annotations

import json
import math
import reprlib
from argparse import Namespace
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from corral.errors import ConfigError

LARGEST = 256 << 10  # bytes of a file of patches; a request is not larger
MOST_VALUES = 20_000  # in it


def nodes_of(args: Namespace) -> dict[str, Any]:
    """Fields of a request: resources, profile, layout, patches; only what was asked for. Raises ConfigError."""
    asked = {"nodes": args.nodes, "accelerators_per_node": args.devices, "kind": args.kind}
    asked |= {name: getattr(args, name) for name in ("cpu", "memory", "shm")}
    given = {name: value for name, value in asked.items() if value is not None}
    found: dict[str, Any] = {"profile": args.profile}
    if set(given) == {"nodes"}:
        found["worker_replicas"] = args.nodes  # the first protocol's word, so that an older service takes it too
    elif given:
        found["resources"] = given
    if args.head is not None:
        found["layout"] = {"head": args.head}
    if args.patch:
        found["template_patches"] = [patch for path in args.patch for patch in _patches(path)]
    return {name: value for name, value in found.items() if value is not None}


def _patches(path: Path) -> list[dict[str, Any]]:
    """The operations in a file: JSON Patch (RFC 6902) as JSON or YAML. Raises ConfigError that names the file."""
    try:
        text = path.read_bytes()[: LARGEST + 1].decode()
        if len(text) > LARGEST:
            raise ConfigError(f"--patch {path} is over {LARGEST >> 10} KiB; a request is not larger")
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--patch {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: also a date that is none
        raise ConfigError(f"--patch {path} is neither JSON nor YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and set(content) == {"template_patches"}:
        content = content["template_patches"]
    if not isinstance(content, list) or not content or not all(isinstance(each, dict) for each in content):
        raise ConfigError(f"--patch {path} has to be a list of operations: [{{op, path, value}}, ...]")
    if (odd := next(_not_json(content), None)) is not None:
        raise ConfigError(f"--patch {path}: {odd}")
    return content


def _not_json(content: Any) -> Iterator[str]:
    """What a request cannot hold, though YAML can. References to one part add up: a small file may mean a huge one."""
    left, seen = [content], 0
    while left:
        one, seen = left.pop(), seen + 1
        if seen > MOST_VALUES:
            yield f"means over {MOST_VALUES} values; it refers to its own parts too often"
            return
        if isinstance(one, dict):
            yield from (
                f"key {reprlib.repr(key)} has to be a text; put it in quotes" for key in one if type(key) is not str
            )
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif not isinstance(one, str | int | float | None) or (isinstance(one, float) and not math.isfinite(one)):
            shown = one.isoformat() if isinstance(one, date) else reprlib.repr(one)
            yield f"{shown} has to be a text or a number; put it in quotes"


def check_output(args: Namespace) -> None:
    """Raise ConfigError for a form of output that nobody would see."""
    if args.output is not None and not args.dry_run:
        raise ConfigError(f"-o {args.output} is how --dry-run prints what would be created; add --dry-run")


def as_asked(manifest: str | None, form: str) -> str:
    """What would be created, and nothing else. Raises ConfigError when the service's backend creates nothing."""
    if manifest is None:
        raise ConfigError(
            f"-o {form}: this service makes no manifest; its backend creates nothing of that kind (kuberay does)"
        )
    if form == "yaml":
        return manifest.removesuffix("\n")
    return json.dumps(yaml.safe_load(manifest), indent=2)
