"""`corral data`: make data sets."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `data` with its commands. A parsed namespace carries `run`, which takes it and returns the exit code."""
    data = subparsers.add_parser("data", help="make data sets in the parquet row format training reads")
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND")

    arithmetic = kinds.add_parser(
        "arithmetic",
        help="generate word problems of graded difficulty",
        description="Write OUT/train.parquet and OUT/test.parquet: word problems of one to four operations. "
        "The same seed gives the same rows; files already there are replaced.",
    )
    arithmetic.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    arithmetic.add_argument("--seed", type=int, default=0, help="default 0")
    arithmetic.add_argument("--train", type=int, default=1024, metavar="N", help="training rows, default 1024")
    arithmetic.add_argument("--test", type=int, default=128, metavar="N", help="test rows, default 128")
    arithmetic.set_defaults(run=_arithmetic)

    gsm8k = kinds.add_parser(
        "gsm8k",
        help="convert GSM8K",
        description="Write OUT/train.parquet and OUT/test.parquet from the published GSM8K files in SRC "
        "(train.jsonl and test.jsonl, or parquet files with the columns question and answer).",
    )
    gsm8k.add_argument("src", type=Path, metavar="SRC", help="folder with the published files")
    gsm8k.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    gsm8k.set_defaults(run=_gsm8k)


def _arithmetic(args: argparse.Namespace) -> int:
    from corral.data.arithmetic import write_arithmetic

    return _report(write_arithmetic(args.out, seed=args.seed, train=args.train, test=args.test))


def _gsm8k(args: argparse.Namespace) -> int:
    from corral.data.gsm8k import write_gsm8k

    return _report(write_gsm8k(args.src, args.out))


def _report(files: Iterable[Path]) -> int:
    from pyarrow.parquet import read_metadata

    for file in files:
        print(f"{file}: {read_metadata(file).num_rows} rows")
    return 0
