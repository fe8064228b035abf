"""Where a run happens: device type, world and launcher."""

from __future__ import annotations

from collections.abc import Mapping

from corral.config.plan import Topology
from corral.config.schema.trainer import Trainer
from corral.errors import ConfigError


def topology(trainer: Trainer, device: str, environ: Mapping[str, str]) -> tuple[Topology, list[str]]:
    """The topology and what to tell the user about it. RAY_ADDRESS set: join that cluster.

    Raises ConfigError for several accelerator nodes without a cluster.
    """
    nodes, devices = trainer.nnodes, trainer.n_gpus_per_node
    address = environ.get("RAY_ADDRESS") or None
    launcher = "in_process" if nodes * devices == 1 and address is None else "ray"
    notices = []
    if launcher == "ray" and address is None:
        if device != "cpu" and nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={nodes} on {device} needs a Ray cluster and RAY_ADDRESS is not set: run `ray start "
                "--head` on one node, `ray start --address=HEAD:6379` on the others, then set RAY_ADDRESS=HEAD:6379"
            )
        where = "node with" if nodes == 1 else "nodes with"
        each = "" if nodes == 1 else " each"
        notices.append(
            f"RAY_ADDRESS is not set: {nodes} local Ray {where} {devices} {'logical ' if device == 'cpu' else ''}"
            f"devices{each} will be started on this machine"
        )
    return Topology(device, nodes, devices, launcher, address), notices
