"""Which ranks a rank can open a plain connection to: asked only after the backend failed to, to name the pair."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Mapping

BACKLOG = 1024


class Door:
    """A port of this process that nobody answers at, but the kernel accepts connections on. master: "host:port"."""

    def __init__(self, master: str) -> None:
        host, _, port = master.rpartition(":")
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: it chooses the interface that leads there
            self._own = probe.getsockname()[0]
        self._listener = socket.create_server((self._own, 0), family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = (self._own, self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.close()


def unreachable(doors: Mapping[int, tuple[str, int]], seconds: float) -> list[int]:
    """Ranks whose door does not accept a connection within so many seconds; all are tried at once."""
    failed = set(doors)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, address in doors.items():
            connection = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
            connection.setblocking(False)
            if connection.connect_ex(address) in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, (rank, connection))
        until = time.monotonic() + seconds
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, connection = key.data
                selector.unregister(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    failed.discard(rank)
    return sorted(failed)
