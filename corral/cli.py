"""The `corral` command. Each command imports what it needs when it runs, so that `corral --help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from corral import __version__
from corral.data import commands as data
from corral.e2e import commands as e2e
from corral.engine import commands as model
from corral.errors import ConfigError
from corral.exits import run_command
from corral.job import commands as job
from corral.stdio import standard_streams
from corral.workers import commands as cluster

_OVERRIDES = "key=value ..., as in docs/configuration.md; quote values with = ( , or ~"


class _Parser(argparse.ArgumentParser):
    """A mistake in the arguments is an error like any other: one line, exit code 78."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""

    def command() -> int:
        with standard_streams():
            args = build_parser().parse_args(argv)
            return int(args.run(args))

    return run_command(command)


def build_parser() -> argparse.ArgumentParser:
    """Every command with its options; a parsed namespace carries `run`, which takes it and returns the exit code."""
    parser = _Parser(prog="corral", description="RL post-training for language models.")
    parser.add_argument("--version", action="version", version=f"corral {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy", description="Print the plan of a run, then train.")
    train.add_argument("overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=_OVERRIDES)
    train.set_defaults(run=_train)

    plan = commands.add_parser(
        "plan",
        help="print what a run would do",
        description="Print the resolved plan of a run and start nothing: world, degrees, batch sizes, optimizer steps, "
        "token budgets, memory, and the keys that have no effect here.",
    )
    plan.add_argument("--json", action="store_true", help="as JSON, as in plan.json of a run")
    plan.add_argument("overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=_OVERRIDES)
    plan.set_defaults(run=_plan)

    config = commands.add_parser(
        "config",
        help="print the reference of all keys",
        description="Print every key with its type, default, unit and meaning.",
    )
    config.add_argument("pattern", nargs="?", metavar="PATTERN", help="only keys that hold this text")
    form = config.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the page docs/keys.md, always with all keys")
    config.set_defaults(run=_config)

    for group in (data, model, cluster, e2e, job):
        group.add_parsers(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    from corral.trainer.main_ppo import main as train

    return train(args.overrides)


def _plan(args: argparse.Namespace) -> int:
    from corral.config.resolve import resolve
    from corral.config.show import as_json, render

    overrides = [argument for argument in args.overrides if argument != "--json"]
    plan = resolve(overrides).plan
    print(as_json(plan) if args.json or "--json" in args.overrides else render(plan))
    return 0


def _config(args: argparse.Namespace) -> int:
    from corral.config.reference import as_json, as_markdown, as_text, select

    if args.markdown:
        print(as_markdown(), end="")
    else:
        keys = select(args.pattern)
        print(as_json(keys) if args.json else as_text(keys))
    return 0
