"""A small HTTP/1.1 server in a thread, on loopback. Small, so that every way to answer badly is at hand."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

_REASONS = {200: "OK", 201: "Created", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 500: "Server Error"}
_LIMIT = 64 << 20


@dataclass
class Request:
    """target: path and query as they came. headers: names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.target).path.split("/") if part]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


class Exchange:
    """One connection while it serves one request. keep: whether it may serve another one afterwards."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.keep = True

    async def answer(
        self, status: int, body: object, headers: Mapping[str, str] | None = None, part: float = 1.0
    ) -> None:
        """part: of the body that is sent before the connection is cut."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, bytes) else "application/json"
        head = {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}
        self._head(status, head)
        self.writer.write(data[: int(len(data) * part)])
        await self.writer.drain()
        if part < 1.0:
            self.abort()

    async def begin(self, kind: str) -> None:
        """A stream of chunks."""
        self._head(200, {"Content-Type": kind, "Transfer-Encoding": "chunked"})
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        if data:
            self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def until_closed(self) -> None:
        """Read what the client says and answer nothing, until it goes."""
        self.keep = False
        while await self.reader.read(1 << 16):
            pass

    def abort(self) -> None:
        """What was written goes out, and then the connection closes."""
        self.keep = False
        self.writer.close()

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", *(f"{k}: {v}" for k, v in headers.items())]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


Handler = Callable[[Request, Exchange], Awaitable[None]]


class Server:
    """Serves from construction until `close`. loop: its event loop, in a thread of its own. open, connected: how many
    connections there are and ever were. crashes: what handlers raised; their connections close without an answer."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self._handler = handler
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self.crashes: list[BaseException] = []
        self.connected = 0
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="fake kube", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def open(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls, limit=_LIMIT)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self.loop.create_task(self._talk(reader, writer))
        self._connections.add(task)
        self.connected += 1
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashes.append(error)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            exchange = Exchange(reader, writer)
            while exchange.keep and (request := await _request(reader, writer)) is not None:
                exchange.keep = request.headers.get("connection", "").lower() != "close"
                await self._handler(request, exchange)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # the client went away
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif length := int(headers.get("content-length", "0")):
        body = await reader.readexactly(length)
    return Request(method, target, headers, body)
