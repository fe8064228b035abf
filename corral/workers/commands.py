"""`corral cluster local`: Ray nodes on this machine for the length of one command; and `corral doctor`."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from types import FrameType

from corral.arguments import positive, seconds, whole


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cluster` with its commands, and `doctor`. A parsed namespace carries `run`, which takes it and returns the
    exit code."""
    from corral.workers.doctor.command import add_doctor_parser, port

    add_doctor_parser(subparsers)
    cluster = subparsers.add_parser("cluster", help="Ray nodes on this machine")
    commands = cluster.add_subparsers(required=True, metavar="COMMAND")
    local = commands.add_parser(
        "local",
        help="start nodes, run a command on them, end everything",
        description="Start Ray nodes on this machine, run CMD with RAY_ADDRESS set, pass signals on to it, and exit "
        "with its exit code (128 + n when signal n ended it). Nothing is left behind, however this command ends. "
        "With 0 nodes Ray is left out and RAY_ADDRESS is unset: what stays is that all of the command is ended.",
        usage="corral cluster local [options] -- CMD [ARG ...]",
    )
    local.add_argument("--nodes", type=whole, default=1, metavar="N", help="nodes (default: %(default)s)")
    local.add_argument("--devices", type=positive, default=1, metavar="N", help="devices of a node (default: 1)")
    local.add_argument("--resource", default="CPU", metavar="NAME", help="what Ray counts a device as (default: CPU)")
    local.add_argument(
        "--head",
        choices=["shared", "separate"],
        default="shared",
        help="shared: one of the nodes; separate: one more node, without devices (default: shared)",
    )
    local.add_argument("--port", type=port, default=0, metavar="P", help="of the head node (default: any free one)")
    local.add_argument(
        "--start-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds for the nodes to start (default: 120)",
    )
    local.add_argument(
        "--temp-dir",
        type=Path,
        metavar="DIR",
        help="folder of the nodes, made and removed by this command; at most 40 bytes long (default: a new one)",
    )
    local.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="what to run")
    local.set_defaults(run=_local)


def _local(args: argparse.Namespace) -> int:
    from corral.errors import ConfigError
    from corral.workers.local_cluster import LocalCluster

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("corral cluster local: no command to run; add one after --, as in `-- python train.py`")
    with LocalCluster.start(
        args.nodes, args.devices, args.resource, args.port, args.start_timeout, args.temp_dir, args.head
    ) as cluster:
        cluster.run(command, _env(cluster.address))

        def forward(number: int, frame: FrameType | None) -> None:
            cluster.signal(number)

        # From here on the command decides what a signal means. Before, a signal ends the cluster and the command.
        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            return cluster.wait_for_command()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _env(address: str) -> dict[str, str]:
    """Of the command. Without nodes it must not join a cluster that happens to be named in our environment."""
    if not address:
        return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return os.environ | {"RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
