"""The way through the API server to a service: bytes in, bytes out, WebSockets too."""

from __future__ import annotations

import asyncio

from tests.job.backends.kube.http import Exchange, Request

_OWN = frozenset({"host", "authorization", "connection", "content-length", "transfer-encoding"})


async def forward(request: Request, exchange: Exchange, address: tuple[str, int], target: str) -> bool:
    """target: path and query at the service. Our own credentials stay here. False when nothing answers there."""
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return False
    upgrade = "upgrade" in request.headers
    headers = {name: value for name, value in request.headers.items() if name not in _OWN}
    headers |= {"host": f"{address[0]}:{address[1]}", "connection": "Upgrade" if upgrade else "close"}
    headers |= {"content-length": str(len(request.body))} if request.body else {}
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + request.body)
    exchange.keep = False
    back = asyncio.ensure_future(_answer(reader, exchange.writer, upgrade))
    # Without an upgrade the client says nothing more; only that it goes matters.
    there = asyncio.ensure_future(_pump(exchange.reader, writer))
    try:
        # Either end may close: then the other one has nothing more to say either.
        await asyncio.wait((back, there), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (back, there):
            task.cancel()
        await asyncio.gather(back, there, return_exceptions=True)
        writer.close()
        exchange.abort()
    return True


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upgrade: bool) -> None:
    """Said to be the last one of its connection, unless the connection becomes another one."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not upgrade:
        lines = [line for line in head.split(b"\r\n")[:-2] if not line.lower().startswith(b"connection:")]
        head = b"\r\n".join([*lines, b"Connection: close", b"", b""])
    writer.write(head)
    await _pump(reader, writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
