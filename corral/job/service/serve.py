"""`corral serve`: store, backend, runner and app in one process, for one data folder."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace

from corral.errors import ConfigError
from corral.job.backends.choose import backend_of
from corral.job.core.clock import Clock
from corral.job.service.app import create_app
from corral.job.service.auth import agent_token, service_key
from corral.job.service.context import Service
from corral.job.service.gate import is_loopback
from corral.job.service.journal import Journal
from corral.job.service.metrics import Metrics
from corral.job.service.runner import Runner
from corral.job.service.server import Server, listen
from corral.job.service.settings import Settings
from corral.job.service.tokens import TokenFile
from corral.job.service.watch import Watchers
from corral.job.store.bundles import Bundles
from corral.job.store.store import Store

log = logging.getLogger("corral.service")
LAST_JOBS = 60.0  # seconds a private service waits for the end of the jobs it cancelled
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def serve(settings: Settings, private: bool = False) -> int:
    """Run the service until SIGINT or SIGTERM; returns 0. Local jobs go on and are adopted by the next start.

    private: it also ends when standard input does, and cancels all jobs first.

    Raises ConfigError for settings that cannot be served, InfraError when the port or the data folder is in use.
    """
    if settings.token_file is None and not is_loopback(settings.host):
        raise ConfigError(
            f"without a token file anyone who reaches {settings.host!r} could run code: give --token-file "
            "(`corral serve --new-token NAME` makes one), or listen on 127.0.0.1"
        )
    tokens = None if settings.token_file is None else TokenFile(settings.token_file)
    with listen(settings.host, settings.port) as listener:
        settings = reachable(replace(settings, port=listener.getsockname()[1]))
        return asyncio.run(_serve(settings, tokens, listener, private))


async def _serve(settings: Settings, tokens: TokenFile | None, listener: socket.socket, private: bool) -> int:
    clock, backend = Clock(), backend_of(settings)
    journal = Journal(Store(settings.database_url, settings.data_dir, clock, log_bytes=settings.limits.log_bytes))
    try:
        key = service_key(settings.data_dir)
        bundles = Bundles(settings.data_dir, settings.limits.bundle, settings.limits.unpacked)
        metrics, watchers = Metrics(), Watchers(settings.limits.watchers)
        runner = Runner(
            journal,
            backend,
            settings,
            clock,
            lambda job_id: agent_token(key, job_id),
            observe_change=metrics.observe_change,
        )
        service = Service(settings, journal, runner, bundles, clock, tokens, key, watchers, metrics)
        server = Server(create_app(service), watchers.stop)
        await runner.start()
        caller = asyncio.create_task(_without_caller(server, journal, runner)) if private else None
        try:
            await _until_ended(server, listener, settings)
        finally:
            if caller is not None:
                caller.cancel()
            await runner.close()
    finally:
        await journal.close()
    return 0


async def _until_ended(server: Server, listener: socket.socket, settings: Settings) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        gc.freeze()  # what is there now stays: no collection has to look at it again
        print(f"corral serve: {settings.url}", flush=True)
        log.info("serving", extra={"url": settings.url, "data_dir": str(settings.data_dir)})
    await serving


async def _without_caller(server: Server, journal: Journal, runner: Runner) -> None:
    """Wait for the end of standard input, then for that of all jobs, and end the server."""
    gone, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        with suppress(OSError):
            while os.read(0, 1 << 16):
                pass
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=read, name="caller", daemon=True).start()  # a read of this kind cannot be cancelled
    await gone.wait()
    for job in await journal.read(journal.store.active):
        await journal.write(journal.store.request_cancel, job.job_id, "caller_gone")
        log.info("cancelled, as the caller is gone", extra={"job": job.job_id})
    runner.wake()
    end = loop.time() + LAST_JOBS
    while await journal.read(journal.store.count_active) and loop.time() < end:
        await asyncio.sleep(0.05)
    server.should_exit = True


def reachable(settings: Settings) -> Settings:
    """With a URL that agents on this machine can use."""
    if settings.public_url is not None:
        return replace(settings, public_url=settings.public_url.rstrip("/"))
    host = _WILDCARDS.get(settings.host, settings.host)
    return replace(settings, public_url=f"http://{f'[{host}]' if ':' in host else host}:{settings.port}")
