"""`corral e2e`: list the cases, run one. Nothing outside the standard library is imported before a command runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `e2e` with its commands. A parsed namespace carries `run`, which takes it and returns the exit code."""
    e2e = subparsers.add_parser("e2e", help="prove a run end to end and print a verdict")
    commands = e2e.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run one case; the last line and the exit status are the verdict")
    run.add_argument("case", metavar="NAME|FILE", help="a case from `corral e2e list`, or a .yaml file")
    run.add_argument(
        "--runs", type=Path, default=Path("runs/e2e"), help="where run folders are made (default: %(default)s)"
    )
    run.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="expect this value of a metric too, for example rollout/replayed=1 (repeatable)",
    )
    run.set_defaults(run=_run)

    listing = commands.add_parser("list", help="name the cases that come with Corral")
    listing.set_defaults(run=_list)


def _run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from corral.e2e.case import find_case
    from corral.e2e.runner import run_case
    from corral.errors import ConfigError

    case = find_case(args.case)
    for given in args.metric:
        name, _, text = given.partition("=")
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"--metric {given}: expected NAME=NUMBER, for example rollout/replayed=1") from None
        case = replace(case, expect=case.expect.with_metric(name, value, value))
    return run_case(case, args.runs)


def _list(args: argparse.Namespace) -> int:
    from corral.e2e.case import case_names, find_case

    for name in case_names():
        print(f"{name}  {find_case(name).summary}")
    return 0
