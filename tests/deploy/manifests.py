"""The objects of deploy/kubernetes, by kind and name."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"


def documents(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """In the order of the kustomization of a folder."""
    return copy.deepcopy(_documents(folder))


@cache
def _documents(folder: Path) -> list[dict[str, Any]]:
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [document for name in listed for document in yaml.safe_load_all((folder / name).read_text())]


def the(kind: str, name: str = "corral", folder: Path = FOLDER) -> dict[str, Any]:
    (found,) = (one for one in documents(folder) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found
