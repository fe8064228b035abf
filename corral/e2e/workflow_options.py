"""Options of `corral e2e workflow`. Standard library only: they are part of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything a project may choose."""
    parser.add_argument("cases", nargs="+", metavar="NAME", help="cases to run")
    parser.add_argument(
        "--out", type=Path, default=Path(".github/workflows/e2e_multinode.yml"), help="file (default: %(default)s)"
    )
