"""Options of `corral e2e workflow`. Standard library only: they are part of the command line."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import NoReturn

from corral.errors import ConfigError

DEFAULT_OUT = Path(".github/workflows/e2e_multinode.yml")
LOCAL = "local"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything a project may choose."""
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="NAME|FILE",
        help="cases to run, or .yaml files of the repository; default: what the existing file was written with",
    )
    parser.add_argument("--tier", metavar="T", help="all cases of a tier, or only those of the named")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not up to date")

    where = parser.add_argument_group("where it runs; a value may be ${{ vars.NAME }}")
    where.add_argument(
        "--service-url",
        default=LOCAL,
        metavar="URL|local",
        help="of the job service; local: one for the run alone, on the runner (default: local)",
    )
    where.add_argument(
        "--runner",
        action="append",
        default=[],
        metavar="LABEL",
        help="of the runner of the job (repeatable; default: ubuntu-latest)",
    )
    where.add_argument(
        "--light-runner", default="ubuntu-latest", metavar="LABEL", help="of the two small jobs (default: %(default)s)"
    )
    where.add_argument(
        "--environment", metavar="NAME", help="GitHub environment of the job, which may guard its secrets"
    )
    where.add_argument("--image", metavar="I", help="container of the job; it has bash, curl, git and Corral")
    where.add_argument("--container-options", metavar="S", help="of that container, such as '--dns 10.0.0.2'")
    where.add_argument("--python", metavar="V", help="version to set up, or none (default: 3.11; none with --image)")
    where.add_argument(
        "--install",
        action="append",
        default=[],
        metavar="COMMAND",
        help="line that installs Corral (repeatable; default: with pip, this version; none with --image)",
    )
    where.add_argument(
        "--token-secret",
        default="CORRAL_TOKEN",
        metavar="NAME",
        help="GitHub secret with the token of the service (default: %(default)s)",
    )

    when = parser.add_argument_group("when it runs")
    when.add_argument("--branch", default="main", metavar="B", help="each push to it is proved (default: %(default)s)")
    when.add_argument(
        "--paths",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="only pull requests that change one of these; ! in front leaves out (default: every one)",
    )
    when.add_argument("--schedule", metavar="CRON", help="as well at these times, such as '17 3 * * *'")
    when.add_argument("--owner", metavar="OWNER", help="only in repositories of this owner, so not in forks of it")
    when.add_argument(
        "--forks",
        choices=["run", "refuse"],
        help="pull requests from forks (default: run on a runner of GitHub's with --service-url local, else refuse)",
    )


def words(args: argparse.Namespace) -> str:
    """The command that gives the same file again, without the options that say nothing new."""
    found = ["corral", "e2e", "workflow", *args.cases]
    for name, default in vars(_parser().parse_args([])).items():
        value = getattr(args, name)
        if name in ("cases", "out", "check", "paths") or value == default:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            found += [f"{option}={one}"] if one.startswith("-") else [option, one]
    return shlex.join([*found, *(["--paths", *args.paths] if args.paths else [])])


def parsed(command: str, out: Path) -> argparse.Namespace:
    """What `words` wrote. Raises ConfigError for what it did not."""
    try:
        found = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{out}: its second line is no command: {error}") from None
    if found[:3] != ["corral", "e2e", "workflow"]:
        raise ConfigError(f"{out}: its second line is no `corral e2e workflow`; name cases on the command line")
    args = _parser().parse_args(found[3:])
    args.out = out
    return args


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `corral e2e workflow --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Quiet(add_help=False)
    add_options(parser)
    return parser
