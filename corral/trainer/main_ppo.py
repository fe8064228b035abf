"""`python -m corral.trainer.main_ppo key=value ...`, also `corral train`: one PPO run from a command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from corral.exits import ending_on_the_spot, run_command
from corral.platform import platform


def main(argv: Sequence[str]) -> int:
    """Resolve, print the plan, train. Returns the exit code; errors of the user are raised as CorralError."""
    with ending_on_the_spot():
        from corral.config.audit import audit
        from corral.config.reads import forget, merged, reads
        from corral.config.resolve import resolve
        from corral.config.show import render

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("ray", "httpx", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    forget()
    resolved = resolve(argv)
    print(render(resolved.plan), flush=True)
    # Threads of torch that wait for each other sleep: where they have to share cores, spinning takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name, value in resolved.plan.rollout.environment.items():
        os.environ.setdefault(name, value)
    if resolved.plan.topology.launcher == "in_process":  # other ranks get them where they start
        for name, value in platform(resolved.plan.topology.device).environment.items():
            os.environ.setdefault(name, value)
    # The heavy part starts here: everything above answers in a second, also when it refuses.
    with ending_on_the_spot():
        from corral.trainer.ppo import fit
        from corral.trainer.run import open_run

    with open_run(resolved.plan, resolved.config) as run:
        if run is None:
            return 0
        fit(run)
        run.records.keys(audit(resolved, merged(reads(), run.group.plan_reads())))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
