"""Whether data gets from one node to another. Sent to the nodes with the probe: the standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading

SENT = 256 << 10  # bytes each way: more than fits into one packet, so that a path that loses large ones shows
PIECE = 1 << 16


class Listener:
    """Answers every connection with what it was sent, until it is closed. Raises OSError when it cannot listen."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), family=_family(address), backlog=256)
        self.address, self.port = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def reach(address: str, port: int, bound: float) -> str:
    """Send data to a Listener and compare what comes back; why that did not work within `bound` seconds, else ""."""
    data = hashlib.shake_128(f"{address}:{port}".encode()).digest(SENT)
    try:
        with socket.create_connection((address, port), timeout=bound) as connection:
            connection.settimeout(bound)
            sender = threading.Thread(target=_send, args=(connection, data), daemon=True)
            sender.start()
            answer = bytearray()
            while len(answer) < SENT and (piece := connection.recv(PIECE)):
                answer += piece
    except TimeoutError:
        return f"no answer in {bound:g} s"
    except OSError as error:
        return str(error.strerror or error)
    return "" if answer == data else f"{len(answer)} of {SENT} bytes, or others, came back"


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def _echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(60.0)
        left = SENT
        while left > 0 and (piece := connection.recv(PIECE)):
            connection.sendall(piece)
            left -= len(piece)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
