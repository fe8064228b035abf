"""From a case to the requests that are submitted: its source, its words with every placeholder filled, its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from corral.e2e.case import Case
from corral.e2e.placeholders import fill
from corral.e2e.read import Found, project_root
from corral.e2e.sealed import MANIFEST
from corral.errors import ConfigError
from corral.job.client import github
from corral.job.client.files import Listing, git_head, list_files
from corral.job.client.submit import pairs
from corral.job.protocol.submit import SubmitRequest

ROLLOUTS = "corral-rollouts"  # where recorded generations lie in the source that is sent
_IN_RUN = "{run_dir}/rollouts"  # where they are recorded; the agent knows the folder
LEASE = 120.0  # seconds without a sign of us after which the service cancels a job
UNKNOWN = "0" * 64  # stands for the digest of the source until it is packed

Role = Literal["main", "reference"]


@dataclass(frozen=True)
class Places:
    """Where the job finds what it needs. needs: folders by name. rollouts: recorded ones, None: there are none yet."""

    needs: Mapping[str, Path]
    rollouts: Path | None = None


@dataclass(frozen=True)
class Source:
    """commit, branch: "" outside git."""

    listing: Listing
    commit: str = ""
    branch: str = ""


def source_of(found: Found, places: Places) -> Source:
    """The files that are sent, and the recorded generations among them. Raises ConfigError."""
    case, root = found.case, project_root(found)
    folder = (root / case.source).resolve()
    listing = list_files(folder)
    if case.paths:
        listing.paths = [path for path in listing.paths if any(_inside(path, chosen) for chosen in case.paths)]
    if places.rollouts is not None:
        listing.placed = {
            f"{ROLLOUTS}/{path.relative_to(places.rollouts).as_posix()}": path
            for path in sorted(places.rollouts.rglob("*"))
            if path.is_file() and path.name != MANIFEST
        }
    commit, branch = git_head(folder) or ("", "")
    return Source(listing, commit, branch)


def _inside(file: str, path: str) -> bool:
    folder = path.rstrip("/")
    return folder in (".", file) or file.startswith(f"{folder}/")


def request_of(found: Found, role: Role, places: Places, source: Source, bundle: str = UNKNOWN) -> SubmitRequest:
    """What is submitted for the main job of a case without `problems`, or for its reference. Raises ConfigError."""
    case = found.case
    parity = case.parity if role == "reference" else None
    assert role == "main" or parity is not None
    values = _values(case, places)
    resources = parity or case.topology
    fields: dict[str, Any] = {
        "name_suffix": _name(case.name, role),
        "args": [fill(word, values) for word in [*case.args, *(parity.args if parity else [])]],
        "env": {name: fill(value, values) for name, value in (case.env | (parity.env if parity else {})).items()},
        "resources": {
            "nodes": resources.nodes,
            "accelerators_per_node": resources.devices_per_node,
            "kind": case.topology.kind,
        },
        "timeouts": {name: getattr(case.deadlines, name) for name in ("queue", "start", "run", "idle", "hang")},
        "retry": {"infra": case.retries},
        "lease": LEASE,
        "bundle": bundle,
        "labels": {"e2e.case": case.name, "e2e.role": role},
        "preflight": {"paths": [str(path) for path in places.needs.values()]},
    }
    if case.script is not None:
        fields["script"] = case.script
    else:
        fields["command"] = [fill(word, values) for word in case.command or []]
    if role == "main" and case.topology.head == "separate":
        fields["layout"] = {"head": "separate"}
    fields |= {name: value for name, value in (("image", case.image), ("secrets", case.secrets)) if value}
    try:
        return SubmitRequest.model_validate(fields | _origin(source))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"case {case.name}: {str(first['msg']).removeprefix('Value error, ')}") from None


def _origin(source: Source) -> dict[str, Any]:
    """The workflow run we are part of, else the commit of the source."""
    workflow = github.current_run()
    if workflow is not None:
        return {
            "repository": workflow.repository,
            "commit_sha": workflow.commit_sha,
            "branch": workflow.branch,
            "github_run_id": workflow.run_id,
            "github_run_attempt": workflow.run_attempt,
            "lease": github.LEASE,
        }
    return {"commit_sha": source.commit, "branch": source.branch} if source.commit else {}


def _values(case: Case, places: Places) -> dict[str, str]:
    values = {name: str(folder) for name, folder in places.needs.items()}
    if case.rollouts is None:
        return values
    return values | {"rollouts": _IN_RUN if places.rollouts is None else ROLLOUTS}


def _name(case: str, role: Role) -> str:
    name = case if role == "main" else f"{case[:53]}-reference"
    return name.strip("-_.")


def with_metrics(found: Found, wanted: list[str]) -> Found:
    """The case with further expectations, `NAME=VALUE` each. Raises ConfigError."""
    within = dict(found.case.expect.metrics.within)
    for text in wanted:
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            name = ""
        if not name or not math.isfinite(number):
            raise ConfigError(f"--metric {text!r}: expected NAME=NUMBER, such as rollout/replayed=1")
        within[name] = [number, number]
    metrics = found.case.expect.metrics.model_copy(update={"within": within})
    expect = found.case.expect.model_copy(update={"metrics": metrics})
    return replace(found, case=found.case.model_copy(update={"expect": expect}))


def with_env(found: Found, given: list[str]) -> Found:
    """The case with further variables of its jobs, `NAME=VALUE` each, over its own. Raises ConfigError."""
    return replace(found, case=found.case.model_copy(update={"env": found.case.env | pairs(given, "--env")}))
