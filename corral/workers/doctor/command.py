"""The options of `corral doctor`. Standard library only."""

from __future__ import annotations

import argparse
from pathlib import Path

from corral.arguments import positive, seconds, whole


def add_doctor_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = subparsers.add_parser(
        "doctor",
        help="check the nodes of a run before it starts",
        description="Check every node of the Ray cluster that RAY_ADDRESS names, else local nodes as a run would start "
        "them, else this machine; then whether the ranks can talk to each other. Exit codes: 0 all is well; 78 "
        "something was asked for that cannot be; 75 a node or the network between nodes is not fit.",
    )
    doctor.add_argument("--nodes", type=positive, metavar="N", help="nodes the run needs (default: those there are)")
    doctor.add_argument("--devices", type=positive, metavar="M", help="devices of each node (default: those there are)")
    doctor.add_argument("--kind", choices=["auto", "cpu", "gpu", "npu"], default="auto", help="of devices")
    files = doctor.add_argument_group("files, on every node")
    files.add_argument("--path", action="append", default=[], metavar="P", help="has to be readable (repeatable)")
    files.add_argument("--script", metavar="S", help="has to be readable")
    files.add_argument("--source", metavar="DIR", help="has to hold the same files everywhere")
    files.add_argument("--source-digest", metavar="D", help="and has to have this digest")
    files.add_argument("--run-dir", metavar="DIR", help="run folder (default: $CORRAL_RUN_DIR, else this folder)")
    limits = doctor.add_argument_group("limits")
    limits.add_argument("--shm-mib", type=whole, default=64, metavar="N", help="free in /dev/shm (default: 64)")
    limits.add_argument("--disk-mib", type=whole, default=1024, metavar="N", help="free for run folder and temp (1024)")
    limits.add_argument("--clock-skew", type=seconds, default=5.0, metavar="S", help="between nodes (default: 5)")
    limits.add_argument(
        "--port",
        type=port,
        action="append",
        default=[],
        metavar="P",
        help="has to be free (repeatable); MASTER_PORT too",
    )
    limits.add_argument("--wait", type=seconds, default=20.0, metavar="S", help="for nodes to join (default: 20)")
    doctor.add_argument("--no-collective", action="store_true", help="leave out what the ranks do together")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")
    doctor.set_defaults(run=_doctor)


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)


def _doctor(args: argparse.Namespace) -> int:
    from corral.workers.doctor.run import run

    return run(args)
