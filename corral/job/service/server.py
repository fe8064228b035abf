"""uvicorn with our ways of starting and ending."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from corral.errors import ConfigError, InfraError

DRAIN_SECONDS = 1  # for requests under way when the service ends


class Server(uvicorn.Server):
    """Calls `stopping` when the end begins, before it waits for open connections. A signal ends it with a plain return,
    as ending is what a signal asks of a service."""

    def __init__(self, app: FastAPI, stopping: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        except (ValueError, RuntimeError):  # not the main thread: whoever started it sets should_exit
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises InfraError when the port is taken, ConfigError for an address that is not ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror}; give an address of this machine") from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InfraError(f"port {port} of {host} is taken, perhaps by another service; choose --port") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener
