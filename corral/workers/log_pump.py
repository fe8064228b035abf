"""Live output of all ranks on the driver: one reader per node, every line handed on exactly once and in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from corral.workers.launcher import LineSink
from corral.workers.logs import LineCutter

INTERVAL = 0.25  # seconds between polls

ReadNode = Callable[[int, dict[int, int]], dict[int, bytes]]  # (node, rank → offset) → new bytes by rank


class LogPump:
    """A daemon thread that polls the nodes. `offsets[node]` maps the node's ranks to where reading starts.

    The cursors live here, so a failed read is repeated from the same place and nothing is lost or shown twice.
    """

    def __init__(self, read_node: ReadNode, offsets: Sequence[dict[int, int]], sink: LineSink) -> None:
        self._read_node, self._offsets, self._sink = read_node, offsets, sink
        self._cutters = {rank: LineCutter() for node in offsets for rank in node}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rank-logs", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Deliver all that is in the files now, a last line without line end too, within `timeout` seconds."""
        self._ending.set()
        self._thread.join(timeout)

    def _follow(self) -> None:
        try:
            while not self._ending.wait(INTERVAL):
                self._poll()
            while self._poll():
                pass
            for node, offsets in enumerate(self._offsets):
                for rank in offsets:
                    self._hand_on(node, rank, self._cutters[rank].flush())
        except BrokenPipeError:
            return  # nobody reads the driver's output any more; the files stay

    def _poll(self) -> bool:
        """Whether there was anything new."""
        any_new = False
        for node, offsets in enumerate(self._offsets):
            for rank, data in self._read_node(node, offsets).items():
                any_new = True
                offsets[rank] += len(data)
                self._hand_on(node, rank, self._cutters[rank].feed(data))
        return any_new

    def _hand_on(self, node: int, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._sink(node, rank, line)
