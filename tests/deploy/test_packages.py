"""Every package that an environment of ours has is pinned, at the version that is tested."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OF_A_BUILD = (
    "nvidia-",
    "cuda-",
    "triton",
)  # libraries that some builds of torch take along, at versions of their choice
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def needed() -> set[str]:
    """Names of all that the project and its extras need, and what those need, as far as it is installed."""
    extras = PROJECT["optional-dependencies"].values()
    waiting = [Requirement(text) for listed in (PROJECT["dependencies"], *extras) for text in listed]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for text in importlib.metadata.requires(name) or []:
            inner = Requirement(text)
            if inner.name.startswith(OF_A_BUILD):
                continue
            where = [{"extra": extra} for extra in ("", *wanted)]
            if inner.marker is None or any(inner.marker.evaluate(each) for each in where):
                waiting.append(inner)
    return {name for name, _ in seen}


def test_all_that_is_needed_is_pinned_and_what_is_installed_is_that():
    known = pins()
    there = {name: importlib.metadata.version(name) for name in sorted(needed())}
    assert [name for name in there if name not in known] == []
    assert {name: Version(text).public for name, text in there.items()} == {name: known[name] for name in there}
    assert {"ray", "aiohttp", "grpcio", "websockets", "jsonpatch", "kubernetes-validate"} <= there.keys()


def test_nothing_else_is_pinned():
    assert pins().keys() - needed() <= {"setuptools"}  # which builds


def test_the_makefile_installs_every_extra():
    install = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-e '.[" in line)
    assert set(install.partition("[")[2].partition("]")[0].split(",")) == set(PROJECT["optional-dependencies"])
