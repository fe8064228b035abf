"""Why a case could not run, as far as that can be known without starting anything."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from corral.e2e.baseline import baseline_file
from corral.e2e.case import Case
from corral.e2e.placeholders import names_in
from corral.e2e.read import Found, project_root
from corral.errors import ConfigError
from corral.job.client.files import list_files
from corral.job.protocol import names


def problems(found: Found) -> list[str]:
    """One line each; none when the case can be submitted."""
    case = found.case
    return [
        *_source_problems(found),
        *_placeholder_problems(case),
        *_name_problems(case),
        *_expectation_problems(case),
    ]


def remarks(found: Found) -> list[str]:
    """What may be meant, and often is not."""
    case = found.case
    noted = []
    for name, need in case.needs.items():
        if need.path is not None and "{env." not in need.path and not Path(os.path.expanduser(need.path)).exists():
            noted.append(f"need {name}: {need.path} is not on this machine; every node of the job has to have it")
        if not any(f"{{{name}}}" in text for text in _texts(case)):
            noted.append(f"need {name} is made and not used: no {{{name}}} in args, env or command")
    words = [*case.args, *(case.parity.args if case.parity else []), *(case.command or [])]
    if case.parity is not None and not any("trainer.record_phases=" in word for word in words):
        noted.append("parity compares metrics alone; with trainer.record_phases=full it finds where runs part")
    if case.expect.metrics.baseline and not baseline_file(found).exists():
        noted.append(f"no {baseline_file(found)} yet: run the case, then `corral e2e accept RESULT`")
    return noted


def _source_problems(found: Found) -> Iterator[str]:
    case, root = found.case, project_root(found)
    source = (root / case.source).resolve()
    if not source.is_relative_to(root.resolve()):
        yield f"source {case.source} leaves the project {root}"
        return
    if not source.is_dir():
        yield f"source {case.source} is no folder of the project {root}"
        return
    try:
        listed = list_files(source).paths
    except ConfigError as error:
        yield f"source {case.source}: {error}"
        return
    for path in case.paths:
        if not any(_inside(one, path) for one in listed):
            yield f"paths: {path} is not part of the source {source}{_near(path, listed)}"
    sent = [one for one in listed if not case.paths or any(_inside(one, path) for path in case.paths)]
    if case.script is not None and case.script not in sent:
        if (source / case.script).is_file() and case.script not in listed:
            yield f"script {case.script} is there, but git ignores it or it is hidden; `git add -f {case.script}`"
        elif case.script in listed:
            yield f"script {case.script} is not in paths; add it"
        else:
            yield f"script {case.script} is not in the source {source}{_near(case.script, sent)}"


def _inside(file: str, path: str) -> bool:
    folder = path.rstrip("/")
    return folder in (".", file) or file.startswith(f"{folder}/")


def _near(path: str, known: list[str]) -> str:
    same = [one for one in known if Path(one).name == Path(path).name]
    near = same or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return f"; the nearest is {near[0]}" if near else ""


def _texts(case: Case) -> list[str]:
    parity = case.parity
    more = [*parity.args, *parity.env.values()] if parity is not None else []
    return [*(case.command or []), *case.args, *case.env.values(), *more]


def _placeholder_problems(case: Case) -> Iterator[str]:
    known = set(case.needs)
    in_env = known | {"run_dir"} | ({"rollouts"} if case.rollouts is not None else set())
    parity = case.parity
    places = {
        "command": (case.command or [], known),
        "args": (case.args, known),
        "env": (list(case.env.values()), in_env),
        "parity.args": (parity.args if parity else [], known),
        "parity.env": (list(parity.env.values()) if parity else [], in_env),
    }
    for name, need in case.needs.items():
        places[f"needs.{name}"] = ([*(need.make or []), need.path or ""], {"out"} if need.make else set())
    for place, (texts, allowed) in places.items():
        for name in dict.fromkeys(name for text in texts for name in names_in(text)):
            if name not in allowed:
                yield f"{place}: {{{name}}} stands for nothing here{_hint(name, allowed)}"


def _hint(name: str, allowed: set[str]) -> str:
    if name in ("rollouts", "run_dir"):
        return "; give rollouts: {steps: [1]}" if "run_dir" in allowed else "; it is known in env only"
    near = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.0)
    return f"; the nearest is {{{near[0]}}}" if near else ""


def _name_problems(case: Case) -> Iterator[str]:
    """What the service would refuse."""
    env = {**case.env, **(case.parity.env if case.parity else {})}
    for name, value in env.items():
        if problem := names.env_problem(name, value):
            yield problem
    for secret in case.secrets:
        if problem := names.env_problem(secret, ""):
            yield problem.replace("env", "secret", 1)
        elif secret in env:
            yield f"{secret} is in env and in secrets; give it once"
    if case.script is not None and (problem := names.relative_path_problem(case.script)):
        yield f"script: {problem}"
    if case.image and not names.IMAGE.fullmatch(case.image):
        yield f"image {case.image!r} does not match {names.IMAGE.pattern}"


def _expectation_problems(case: Case) -> Iterator[str]:
    expect, world = case.expect, case.topology.world
    if expect.failing_rank is not None and not 0 <= expect.failing_rank < world:
        yield f"expect.failing_rank: {expect.failing_rank} is not one of the ranks 0 to {world - 1} of the topology"
    if expect.status == "SUCCEEDED":
        given = {"failure_class": expect.failure_class, "cause": expect.cause, "failing_rank": expect.failing_rank}
        for name in (name for name, value in given.items() if value is not None):
            yield f"expect.{name}: a job that SUCCEEDED has none; give status: FAILED or TIMEOUT"
        if expect.exit_code not in (None, 0):
            yield f"expect.exit_code: {expect.exit_code}, and a job that SUCCEEDED has 0; give status: FAILED"
    elif case.parity is not None:
        yield f"parity: a job that is expected to end {expect.status} has no results to compare"
    for pattern in expect.files:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            yield f"expect.files: {pattern} leaves the records; give a pattern relative to the run folder"
            continue
        try:
            next(Path("records").glob(pattern), None)
        except (ValueError, IndexError) as error:
            yield f"expect.files: {pattern!r} is no pattern of files: {error}"
    both = sorted(set(expect.ran) & set(expect.not_ran))
    if both:
        yield f"expect: {both[0]} is in ran and in not_ran"
