"""Before the model loads: can the ranks of a job talk to each other over its own backend, rightly and fast enough?

Each rank does the same (all-reduce, all-to-all, broadcast with known values, then an exchange with each peer in turn)
in a thread that may hang, and reports over the store of the world, which is another way than the one that is checked.
Rank 0 waits for the reports, has pairs that look slow measured again, and says what was found; all ranks hear it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from corral.config.plan import Topology
from corral.engine.rank import Rank
from corral.errors import InfraError
from corral.findings import Finding, failures
from corral.workers.collective_host import Bounds
from corral.workers.collective_part import RESULT, Part
from corral.workers.launcher import LineSink

_PREFIX = "collective check: "


class CollectiveError(InfraError):
    """The ranks cannot work together. The message names the place, which need not be the rank that raises it."""

    says_where = True


def check_collectives(
    rank: Rank,
    devices: int,
    run_dir: str | Path,
    *,
    facts: Mapping[str, str] | None = None,
    bounds: Bounds | None = None,
) -> list[Finding]:
    """Check the world of this rank; every rank calls it, instead of `connect` or before it. devices: of each node.

    facts: what has to be the same on all ranks, beside the versions and the device. Rank 0 leaves collective.json in
    run_dir, and gets the good pairs too. Raises CollectiveError, on every rank that still can, with one line that names
    rank, pair or node.
    """
    if rank.world == 1:
        return []
    nodes = [number // devices for number in range(rank.world)]
    found = Part(rank, nodes, Path(run_dir), dict(facts or {}), bounds or Bounds()).findings()
    bad = failures(found)
    if bad:
        more = f" ({len(bad) - 1} more in {RESULT})" if len(bad) > 1 else ""
        raise CollectiveError(f"{_PREFIX}{bad[0].line()}{more}")
    return found


class CheckWorker:
    """A worker that does nothing but the check, for whoever has no model to load."""

    def __init__(self, rank: Rank, devices: int, run_dir: str, bounds: Bounds) -> None:
        self._found = check_collectives(rank, devices, run_dir, bounds=bounds)

    def findings(self) -> list[Finding]:
        """Of the whole world, on rank 0; all of them good, or this object could not have been made."""
        return self._found


def collective_findings(
    topology: Topology,
    run_dir: str | Path,
    *,
    wait: float = 120.0,
    bounds: Bounds | None = None,
    sink: LineSink | None = None,
) -> list[Finding]:
    """Start the ranks of a topology, only to check what is between them, and say what was found, good or bad.

    On the cluster that topology.ray_address names, else on local nodes; a world of one has nothing to check. wait:
    seconds for the nodes to be there. Logs and collective.json lie in run_dir. Raises InfraError when nodes or devices
    are missing or a rank dies.
    """
    from corral.workers.ray_launcher import RayLauncher

    if topology.world == 1:
        return []
    launcher = None
    try:
        launcher = RayLauncher(
            topology,
            worker="corral.workers.collective_check:CheckWorker",
            worker_args=(topology.devices_per_node, str(run_dir), bounds or Bounds()),
            run_dir=run_dir,
            preload=("corral.workers.collective_check",),
            wait=wait,
            sink=sink,
        )
        found: list[list[Finding]] = launcher.call("findings", [()] * topology.world)
        return found[0]
    except InfraError as error:
        if not str(error).startswith(_PREFIX):
            raise
        return read_findings(Path(run_dir)) or [Finding("collective", False, "all ranks to agree", str(error))]
    finally:
        if launcher is not None:
            launcher.close()


def read_findings(run_dir: Path) -> list[Finding]:
    """What collective.json in a run folder holds; nothing when there is none."""
    file = run_dir / RESULT
    if not file.exists():
        return []
    return [Finding.from_dict(fields) for fields in json.loads(file.read_text(encoding="utf-8"))["findings"]]
