"""vllm's worker on the CPU, where the ranks of a replica share memory. Imported by vllm, by name."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class CpuRank(CPUWorker):  # type: ignore[misc]
    """A worker in a process that was started, and joined to the others, by the trainer."""

    def init_device(self) -> None:
        # The shared memory is named after what follows the last colon, which has to differ between the runs of a
        # machine. Nothing else is read of it: the process group is there already.
        self.distributed_init_method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        super().init_device()
        group = get_tp_group()
        if group.world_size > 1:  # all have it open by now: without its name it is gone when they are
            name = group.device_communicator.dist_module.group_name
            Path("/dev/shm", f"{name}_{group.rank_in_group}").unlink(missing_ok=True)
