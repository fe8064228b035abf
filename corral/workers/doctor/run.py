"""`corral doctor`: examine the nodes, let the ranks talk, say what was found."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from corral.atomic import write_text
from corral.config.plan import Topology
from corral.config.schema.trainer import Trainer
from corral.config.topology import topology
from corral.errors import ConfigError, InfraError
from corral.findings import Finding, failures
from corral.platform import detect
from corral.workers.doctor.asked import Asked, SeenNode
from corral.workers.doctor.examine import examine
from corral.workers.doctor.places import cluster_of, places_of
from corral.workers.doctor.table import lines
from corral.workers.node_env import wanted_of

DEVICES = {"cpu": "cpu", "gpu": "cuda", "npu": "npu"}


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, 75, or 78 when something of the request cannot be."""
    began = time.monotonic()
    asked = asked_of(args, os.environ)
    where, notices = _topology(asked)
    for notice in notices:
        print(notice, flush=True)
    with cluster_of(where, asked) as where:
        with places_of(where, asked) as places:
            nodes, found = examine(places, asked)
        if not args.no_collective and not failures(found):
            found += _collective(where, nodes, asked)
    took = time.monotonic() - began
    if args.json is not None:
        write_text(args.json, json.dumps(_report(nodes, found, took), indent=1) + "\n")
    print("\n".join(lines(nodes, found, took)), flush=True)
    bad = failures(found)
    if not bad:
        return 0
    return ConfigError.exit_code if any(each.kind == "config" for each in bad) else InfraError.exit_code


def asked_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Asked:
    """Raises ConfigError for a MASTER_PORT that is none."""
    if args.source_digest is not None and args.source is None:
        raise ConfigError("--source-digest needs --source, the folder that has to have it")
    ports = list(args.port)
    if master := environ.get("MASTER_PORT"):
        if not master.isdecimal() or not 1 <= int(master) <= 65535:
            raise ConfigError(f"MASTER_PORT={master[:80]!r} is not a port, 1 to 65535; unset it")
        ports.append(int(master))
    return Asked(
        nodes=args.nodes,
        devices=args.devices,
        device=DEVICES.get(args.kind) or detect().device,
        run_dir=os.path.abspath(args.run_dir or environ.get("CORRAL_RUN_DIR") or "."),
        script=args.script and os.path.abspath(args.script),
        paths=tuple(map(os.path.abspath, args.path)),
        source=args.source and os.path.abspath(args.source),
        source_digest=args.source_digest,
        ports=tuple(dict.fromkeys(ports)),
        shm_mib=args.shm_mib,
        disk_mib=args.disk_mib,
        clock_skew=args.clock_skew,
        wait=args.wait,
        wanted=wanted_of(environ),
    )


def _topology(asked: Asked) -> tuple[Topology, list[str]]:
    """Where a run of this size would happen."""
    return topology(Trainer(nnodes=asked.nodes or 1, n_gpus_per_node=asked.devices or 1), asked.device, os.environ)


def _collective(where: Topology, nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    """What the ranks find when they talk to each other; on nodes that are not fit that would only say it again."""
    there = min((node.devices or 1 for node in nodes), default=1)
    devices = asked.devices or (1 if asked.device == "cpu" else there)
    world = replace(where, nnodes=asked.nodes or len(nodes), devices_per_node=devices)
    if world.world == 1 or world.ray_address is None:
        return []
    from corral.workers.collective_check import collective_findings

    with tempfile.TemporaryDirectory(prefix="corral-doctor-") as folder:
        try:
            return collective_findings(world, folder, wait=asked.wait)
        except InfraError as error:
            return [Finding("collective", False, f"{world.world} ranks that start and talk", str(error))]


def _report(nodes: Sequence[SeenNode], found: Sequence[Finding], took: float) -> dict[str, object]:
    return {
        "seconds": round(took, 3),
        "nodes": [{"node": node.number, "name": node.name, "address": node.address} for node in nodes],
        "findings": [finding.as_dict() for finding in found],
    }
