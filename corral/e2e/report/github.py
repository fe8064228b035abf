"""A result told to GitHub Actions: summary, outputs, and errors at their places in the source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from corral import atomic
from corral.e2e.case import Case
from corral.e2e.read import Found, project_root
from corral.e2e.report import text
from corral.e2e.report.markdown import LIMIT, markdown
from corral.e2e.report.records import read_json
from corral.e2e.report.story import Side, Story, read_story
from corral.e2e.result import Result
from corral.errors import ConfigError
from corral.job.client.files import list_files
from corral.job.client.github import add_summary, error_command, set_outputs, summary_room
from corral.job.client.traceback import Tracebacks

MOST_ERRORS = 10  # the runner shows no more of a step
_MATCHER = Path(__file__).parent / "problem-matcher.json"


def announce(result: Result, folder: Path, env: Mapping[str, str]) -> None:
    """Append the report to the step's summary as far as there is room, set the outputs verdict, result and report, and
    print an error for each place of the source that the failure points to. Nothing happens outside Actions.

    Commands have to be obeyed again when this is called: no token may be in force.
    """
    if env.get("GITHUB_ACTIONS") != "true":
        return
    story = read_story(result, folder)
    room = min(LIMIT, summary_room(env))
    if room > 2_000:
        add_summary(env, markdown(story, room))
    outputs = {"verdict": result.status, "result": f"{folder / 'result.json'}", "report": f"{folder / 'report.html'}"}
    set_outputs(env, outputs)
    sys.stdout.write("".join(errors(story, env)))
    sys.stdout.flush()


def match_tracebacks(env: Mapping[str, str]) -> None:
    """Have the runner look for Python tracebacks in what this step prints from here on. Nothing happens outside
    Actions. Raises InfraError when its temporary folder cannot be written."""
    temporary = env.get("RUNNER_TEMP")
    if env.get("GITHUB_ACTIONS") != "true" or not temporary:
        return
    # The runner may be outside the container we are in; of our files it sees those in its temporary folder.
    file = Path(temporary) / "corral-problem-matcher.json"
    atomic.write_text(file, _MATCHER.read_text(encoding="utf-8"))
    sys.stdout.write(f"::add-matcher::{file}\n")
    sys.stdout.flush()


def errors(story: Story, env: Mapping[str, str]) -> list[str]:
    """A command for each place, the failing rank's first; one without a place when nothing points into the source."""
    if story.passed:
        return []
    places: dict[tuple[str, int], tuple[str, str]] = {}
    title = text.line(story.result.case, 80)
    root, prefix = _source(story.folder, env)
    for check in story.failed:
        if check.file and (root / check.file).is_file() and ".." not in Path(check.file).parts:
            places.setdefault((f"{prefix}{check.file}", check.line or 1), (title, text.line(check, 1000)))
    side = story.failing or story.main
    members = _members(root) if side is not None and any(log.error is not None for log in side.logs) else frozenset()
    for source, file, line, error in _tracebacks(side, members) if side is not None else []:
        places.setdefault((f"{prefix}{file}", line), (f"{title}, {source}", text.line(error, 1000)))
    commands = [error_command(said, head, file, line) for (file, line), (head, said) in places.items()]
    return commands[:MOST_ERRORS] or [error_command(text.line(story.result.reason, 1000), title)]


def _source(folder: Path, env: Mapping[str, str]) -> tuple[Path, str]:
    """Folder of the case's source, and how a path in it begins seen from the root of the repository. The root itself
    when it cannot be told, or is none of it: a case that comes with Corral."""
    workspace = Path(env.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    said = read_json(folder / "case.json")
    try:
        case = Case.model_validate(said["case"])
        root = (project_root(Found(case, Path(said["file"]))) / case.source).resolve()
        below = root.relative_to(workspace).as_posix()
    except (TypeError, KeyError, ValueError, OSError):
        return workspace, ""
    return root, "" if below == "." else f"{below}/"


def _members(root: Path) -> frozenset[str]:
    try:
        return frozenset(list_files(root).paths)
    except ConfigError:  # files that could not be sent either: no place then
        return frozenset()


def _tracebacks(side: Side, members: frozenset[str]) -> list[tuple[str, str, int, str]]:
    """(log, file, line, error) of the tracebacks in the logs, those of the log to read first before others."""
    first = side.failing_log()
    found: list[tuple[str, str, int, str]] = []
    for log in sorted(side.logs, key=lambda log: log is not first):
        tracebacks = Tracebacks(members)
        for at, part in enumerate(log.parts):
            for line in part:  # a traceback does not go on across a gap
                tracebacks.feed({"source": f"{log.source} {at}", "line": line.text, "rank": log.rank})
        found += [(log.source, place.file, place.line, place.error) for place in tracebacks.places()]
    return found
