"""`corral e2e list`, `validate` and `prepare`: what needs no run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from corral.e2e.caches import cache_root
from corral.e2e.caches import prepare as prepare_needs
from corral.e2e.case import Case
from corral.e2e.problems import problems, remarks
from corral.e2e.process import Signals
from corral.e2e.read import Found, case_files, find_cases, read_cases
from corral.errors import ConfigError


def show(args: argparse.Namespace) -> int:
    """`corral e2e list [--tier T] [--json]`."""
    chosen = find_cases([], args.tier)
    if args.json:
        print(json.dumps([_as_json(found) for found in chosen], indent=2))
        return 0
    rows = [_row(found.case) for found in chosen]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def validate(args: argparse.Namespace) -> int:
    """`corral e2e validate [NAME|FILE ...]`: one line a case, all problems of all of them. Raises ConfigError at the
    end when there was one."""
    count = bad = 0
    for found in _to_validate(args.cases):
        if isinstance(found, ConfigError):
            wrong, noted, name = [str(found)], [], ""
        else:
            wrong, noted, name = problems(found), remarks(found), found.case.name
        count += 1
        bad += bool(wrong)
        if not wrong:
            print(f"ok       {name}")
        for line in wrong:
            print(f"problem  {f'{name}: ' if name else ''}{line}")
        for line in noted:
            print(f"note     {name}: {line}")
    if bad:
        raise ConfigError(f"{bad} of {count} cases cannot run; see above")
    return 0


def prepare(args: argparse.Namespace) -> int:
    """`corral e2e prepare [NAME|FILE ...] [--tier T] [--cache DIR]`: make what is missing, and say where it lies."""
    root = cache_root(args.cache, os.environ)
    chosen = find_cases(args.cases, args.tier)
    with Signals() as signals:
        for found in chosen:
            folders = prepare_needs(found.case, root, _say, signals)
            for name, folder in folders.items():
                _say(f"{found.case.name}: {name} {folder}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _to_validate(names: Sequence[str]) -> list[Found | ConfigError]:
    """Without names every file is looked at, also after one that cannot be read."""
    if names:
        return list(find_cases(names))
    listed: list[Found | ConfigError] = []
    first: dict[str, Path] = {}
    for file in case_files():
        try:
            cases = read_cases(file)
        except ConfigError as error:
            listed.append(error)
            continue
        for case in cases:
            if case.name in first:
                listed.append(ConfigError(f"{file}: case {case.name!r} is also in {first[case.name]}; rename one"))
            else:
                first[case.name] = file
                listed.append(Found(case, file))
    return listed


def _row(case: Case) -> list[str]:
    topology = case.topology
    return [case.name, ",".join(case.tiers), f"{topology.nodes}x{topology.devices_per_node}", case.summary]


def _as_json(found: Found) -> dict[str, object]:
    return {"file": str(found.file), "shipped": found.shipped, **found.case.model_dump(mode="json")}
