"""`python -m corral.job.agent.mirror FOLDER`: keeps the folders of an attempt on all nodes of a Ray cluster alike.

A process of its own, so that the agent is no Ray driver: what happens to this one, or to Ray, is not the end of a job.
It takes orders on its standard input, one a line, and answers each with a line of JSON:

begin           the source is on every node that is alive: {"nodes": how many others, "problem": why not, or null}
last SECONDS    what was written on other nodes is here, or the time is over: {"complete": whether it is}
private, remove the source, or the whole folder, is gone on other nodes

In between, what grows under `run/` of other nodes is copied here, nodes that join get the source, and what people
should know is said as {"said": line}. When its input ends without an order to remove, the agent was lost: the source
goes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.job.agent.attempt import Attempt
from corral.job.agent.mirrored import Mirrored

TURN = 0.2  # seconds of waiting for nodes between looks for orders


def main(argv: list[str]) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print

    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    attempt = Attempt.load(Path(argv[1]))
    orders: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    nodes = Mirrored(attempt, lambda line: say(said=line))
    _obey(attempt, nodes, orders, say)
    return 0


def _read(orders: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        orders.put(line.strip())
    orders.put(None)


def _obey(attempt: Attempt, nodes: Mirrored, orders: queue.Queue[str | None], say: Callable[..., None]) -> None:
    begun = False
    while True:
        try:
            order = orders.get_nowait() if begun else orders.get()
        except queue.Empty:
            nodes.turn(TURN)
            continue
        if order is None:
            nodes.remove(all_of_it=False)
            return
        name, _, argument = order.partition(" ")
        if name == "begin":
            others, problem = nodes.begin()
            say(nodes=others, problem=problem)
            begun = True
            if not others and attempt.spec.nodes == 1:
                return
        elif name == "last":
            say(complete=nodes.last(float(argument)))
        else:
            nodes.remove(all_of_it=name == "remove")
            say(removed=True)
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv))
