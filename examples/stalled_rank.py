"""Two ranks that take turns, and a fault: rank 1 stops in step 3, as a process does that waits for a device for ever.

For the case hang-detection. Rank 0 waits and goes on printing, so neither its output nor its life says that anything is
wrong; the progress files do.
"""

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

FAULT_IN_STEP = 3


def tell(rank: int, step: int) -> None:
    """What Corral's own ranks write: rank, node, pid, what they do, and a counter that rises while they get on."""
    path = Path(os.environ["CORRAL_RUN_DIR"], "progress", f"rank-{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"rank": rank, "node": rank, "pid": os.getpid(), "method": "step", "calls": step, "state": "running"}
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({**record, "time": time.time()}))
    unfinished.replace(path)


def other_rank(turns: Connection) -> None:
    while True:
        step = turns.recv()
        tell(1, step)
        if step == FAULT_IN_STEP:
            os.kill(os.getpid(), signal.SIGSTOP)
        turns.send(step)


def main() -> None:
    turns, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=other_rank, args=(theirs,), daemon=True).start()
    step = 0
    while True:
        step += 1
        tell(0, step)
        turns.send(step)
        while not turns.poll(1.0):
            print(f"step {step}: waiting for rank 1", flush=True)
        turns.recv()


if __name__ == "__main__":
    main()
