"""Things that go wrong on the way: a recorded stream served from memory, and a proxy that cuts, stalls and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from corral.job.protocol.events import encode, encode_lines

Answer = Callable[[str, dict[str, str]], bytes]


def recorded(
    lines: int, ranks: int = 0, status: str = "SUCCEEDED", text: str = "step {} ünïcode \u2028"
) -> list[bytes]:
    """A job's events: states, `lines` log lines over driver and ranks, the verdict."""
    events = [encode(1, 1.0, 1, "status", {"status": "ACCEPTED", "message": ""})]
    events.append(encode(2, 2.0, 1, "status", {"status": "RUNNING", "message": "on 2 nodes"}))
    for number in range(lines):
        rank = number % (ranks + 1) - 1
        place = ("driver", None, None) if rank < 0 else (f"node-{rank // 4}/rank-{rank}", rank // 4, rank)
        events.append(encode_lines(len(events) + 1, 3.0, 1, *place, [text.format(number)], [number * 10]))
    verdict = {"status": status, "cause": "exit_code", "message": "done", "exit_code": 0}
    events.append(encode(len(events) + 1, 4.0, 1, "final", verdict))
    return events


def after(events: Sequence[bytes], seq: int) -> bytes:
    return b"".join(event for event in events if json.loads(event)["seq"] > seq)


def ok(body: bytes, kind: str = "application/x-ndjson", chunk: int = 700) -> bytes:
    """A whole chunked answer."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = (body[start : start + chunk] for start in range(0, len(body), chunk))
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def cut(body: bytes, kind: str = "application/x-ndjson") -> bytes:
    """The same without its end: a connection that is lost."""
    return ok(body, kind).removesuffix(b"0\r\n\r\n")


def plain(status: str, body: object = None, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server that sends what `answer(path, query)` gives, one request a connection; its URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
            url = urlsplit(target)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            writer.write(answer(f"{method} {url.path}", query))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def proxy(
    target: str, budgets: Iterable[int | None], stall: bool = False
) -> AsyncIterator[tuple[str, list[int]]]:
    """A proxy in front of `target` that cuts the n-th connection after budgets[n] bytes of the answer (None: never);
    when the budgets are used up it cuts nothing. stall: it goes silent instead. (URL, bytes passed per connection)."""
    url = urlsplit(target)
    left = iter(budgets)
    passed: list[int] = []
    stalled: list[asyncio.StreamWriter] = []
    open_: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        open_.add(me)
        me.add_done_callback(open_.discard)
        budget = next(left, None)
        number = len(passed)
        passed.append(0)
        up_reader, up_writer = await asyncio.open_connection(url.hostname, url.port)
        upward = asyncio.create_task(_pump(reader, up_writer))
        try:
            while data := await up_reader.read(1 << 16):
                if budget is not None:
                    data = data[: budget - passed[number]]
                passed[number] += len(data)
                writer.write(data)
                await writer.drain()
                if passed[number] == budget:
                    break
        except ConnectionError:
            pass
        finally:
            upward.cancel()
            up_writer.close()
            if stall and budget is not None and passed[number] == budget:
                stalled.append(writer)
            else:
                writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", passed
        for writer in stalled:
            writer.close()
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
