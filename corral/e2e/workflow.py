"""`corral e2e workflow`: write the GitHub workflow of a project, keep it up to date, leave alone what was edited."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from pathlib import Path

from corral import atomic
from corral.e2e.read import find_cases
from corral.e2e.workflow_options import LOCAL, parsed
from corral.e2e.workflow_text import HOSTED_MINUTES, command_of, hosted, minutes, rendered, untouched
from corral.errors import ConfigError


def write(args: Namespace) -> int:
    """Write `args.out`, or with `--check` compare it: 0 when it is up to date, else 1 and the difference.

    Raises ConfigError for options that cannot be, and for a file that Corral did not write or somebody has edited.
    """
    _check_place(args.out)
    existing = _existing(args.out)
    options = args
    if not args.cases and args.tier is None:
        command = command_of(existing or "")
        if command is None:
            raise ConfigError(f"name cases: {args.out} is not there or not written by Corral; see `corral e2e list`")
        options = parsed(command, args.out)
    found = find_cases(options.cases, options.tier)
    text = rendered(options, found, existing or "")
    if args.check:
        return _compared(args.out, existing, text)
    if existing is not None and not untouched(existing):
        raise ConfigError(
            f"{args.out} was not written by `corral e2e workflow`, or was edited since; "
            "move it away, or write beside it with --out FILE"
        )
    if existing == text:
        print(f"{args.out} is up to date")
        return 0
    atomic.write_text(args.out, text)
    print(f"wrote {args.out}; commit it, and require the check `e2e-verdict`")
    _warn(options, minutes([one.case for one in found], options.service_url == LOCAL))
    return 0


def _check_place(file: Path) -> None:
    """Raises ConfigError below the root of a repository: GitHub would not see what is written there."""
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    if root != here and file.absolute().is_relative_to(here / ".github"):
        raise ConfigError(f"GitHub reads workflows at the root of a repository only; run this in {root}")


def _existing(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def _compared(file: Path, existing: str | None, text: str) -> int:
    if existing == text:
        print(f"{file} is up to date")
        return 0
    lines = (existing or "").splitlines(), text.splitlines()
    for line in difflib.unified_diff(*lines, str(file), f"{file} as it would be", lineterm=""):
        print(line)
    why = "is not there" if existing is None else "is not up to date" if untouched(existing) else "was edited"
    print(f"error: {file} {why}; run `corral e2e workflow`", file=sys.stderr)
    return 1


def _warn(args: Namespace, bound: int) -> None:
    if hosted(args) and bound > HOSTED_MINUTES:
        print(
            f"note: the deadlines allow {bound} minutes, a job on this runner {HOSTED_MINUTES}; shorten `deadlines` of "
            "the cases, so that a case that hangs is reported",
            file=sys.stderr,
        )
