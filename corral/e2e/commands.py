"""`corral e2e`: the cases, what they prove, and what CI needs. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from corral.arguments import seconds


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `e2e` with its commands. A parsed namespace carries `run`, which takes it and returns the exit code."""
    e2e = subparsers.add_parser("e2e", help="prove a run end to end and print a verdict")
    commands = e2e.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_replay(commands)
    _add_accept(commands)
    _add_workflow(commands)

    listing = commands.add_parser("list", help="name the cases: those of Corral, then those in ./e2e")
    listing.add_argument("--tier", metavar="T", help="only of this tier")
    listing.add_argument("--json", action="store_true", help="as JSON, with everything a case says")
    listing.set_defaults(run=_list)

    validate = commands.add_parser("validate", help="check case files and what they point to; start nothing")
    validate.add_argument("cases", nargs="*", metavar="NAME|FILE", help="default: all")
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON Schema of a case file")
    schema.set_defaults(run=_schema)

    prepare = commands.add_parser("prepare", help="make the models and data that cases need, on this machine")
    prepare.add_argument("cases", nargs="*", metavar="NAME|FILE", help="default: all of the tier")
    prepare.add_argument("--tier", metavar="T", help="only of this tier")
    prepare.add_argument(
        "--cache", type=Path, metavar="DIR", help="where (default: CORRAL_CACHE, else ~/.cache/corral)"
    )
    prepare.set_defaults(run=_prepare)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run cases; the last line and the exit status are the verdict",
        description="Run cases as jobs, check what they recorded, and write a report of each. The exit status is 0 "
        "when all passed, else that of the first that did not.",
    )
    run.add_argument("cases", nargs="*", metavar="NAME|FILE", help="cases of `corral e2e list`, or .yaml files")
    run.add_argument("--tier", metavar="T", help="all cases of a tier, or only those of the named")
    run.add_argument(
        "--on", default="local", metavar="local|URL", help="a service for this run alone, or a running one"
    )
    run.add_argument(
        "--runs", type=Path, default=Path("runs/e2e"), help="where run folders are made (default: runs/e2e)"
    )
    run.add_argument(
        "--cache", type=Path, metavar="DIR", help="models and data (default: CORRAL_CACHE, ~/.cache/corral)"
    )
    run.add_argument("--no-prepare", action="store_true", help="make no model or data: one that is missing is refused")
    run.add_argument("--no-parity", action="store_true", help="leave the one-process run and the comparison out")
    run.add_argument("--dry-run", action="store_true", help="print what would be submitted; start nothing")
    run.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="expect this value of a metric too, for example rollout/replayed=1 (repeatable)",
    )
    run.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="variable of the jobs, over the case's own; it stands in the report, so no secret (repeatable)",
    )
    run.add_argument("--insecure", action="store_true", help="send the token over http to another machine all the same")
    run.add_argument(
        "--reconnect-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="go on trying for so long when the service is lost (default: 600)",
    )
    run.set_defaults(run=_run)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser("replay", help="run the case of a result once more, on this machine")
    replay.add_argument("result", type=Path, metavar="RESULT", help="result.json, or the folder it lies in")
    replay.add_argument("--runs", type=Path, default=Path("runs/e2e"), help="where the run folder is made")
    replay.add_argument(
        "--cache", type=Path, metavar="DIR", help="models and data (default: CORRAL_CACHE, ~/.cache/corral)"
    )
    replay.set_defaults(run=_replay)


def _add_accept(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    accept = commands.add_parser(
        "accept",
        help="take the metrics of a result as the case's baseline",
        description="Write the baseline of a case from a result, and print what changes, for review in a commit.",
    )
    accept.add_argument("result", type=Path, metavar="RESULT", help="result.json, or the folder it lies in")
    accept.add_argument("--dry-run", action="store_true", help="only print what would change")
    accept.set_defaults(run=_accept)


def _add_workflow(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from corral.e2e.workflow_options import add_options

    workflow = commands.add_parser(
        "workflow",
        help="write the GitHub workflow that runs cases for each change",
        description="Write .github/workflows/e2e_multinode.yml for the project in this folder.",
    )
    add_options(workflow)
    workflow.set_defaults(run=_workflow)


def _run(args: argparse.Namespace) -> int:
    from corral.e2e.run import run

    return run(args)


def _replay(args: argparse.Namespace) -> int:
    from corral.e2e.run import replay

    return replay(args)


def _accept(args: argparse.Namespace) -> int:
    from corral.e2e.baseline import accept

    return accept(args)


def _workflow(args: argparse.Namespace) -> int:
    from corral.e2e.workflow import write

    return write(args)


def _list(args: argparse.Namespace) -> int:
    from corral.e2e.listing import show

    return show(args)


def _validate(args: argparse.Namespace) -> int:
    from corral.e2e.listing import validate

    return validate(args)


def _schema(args: argparse.Namespace) -> int:
    import json

    from corral.e2e.schema import schema

    print(json.dumps(schema(), indent=2))
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from corral.e2e.listing import prepare

    return prepare(args)
