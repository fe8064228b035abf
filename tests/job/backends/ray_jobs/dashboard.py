"""A stand-in for Ray's dashboard: real HTTP and a real web socket on loopback, with the faults met in the wild.

It answers as Ray 2.60 does, odd answers included: an id that exists is a 500 around a 400, the socket replays the log
from its start, cuts it anywhere, and closes in whatever way.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
TWICE = "ValueError: Job with submission_id {} already exists. Please use a different submission_id.\n"
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@dataclass
class Job:
    """log: what the entrypoint printed, after Ray's own first lines."""

    status: str = "RUNNING"
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    entrypoint: str = "python3 -m corral.job.agent.join"
    env: dict[str, str] = field(default_factory=dict)
    log: str = ""
    node: str | None = None

    def end(self, exit_code: int) -> None:
        self.status, self.exit_code = ("FAILED" if exit_code else "SUCCEEDED"), exit_code
        self.error_type = "JOB_ENTRYPOINT_COMMAND_ERROR" if exit_code else None


@dataclass(frozen=True)
class Close:
    """How a socket ends: after so many characters, with that code; None: the connection is cut, which is seen as 1006.
    on_end: only when the log was sent and the job is over."""

    after: int
    code: int | None = 1000


@dataclass
class Dashboard:
    """closes: of the next sockets, one each; then they end as Ray's do. piece: characters sent at once. answers: the
    next ones to calls whose `METHOD path` matches, instead of the real ones; None: none at all, the call hangs."""

    jobs: dict[str, Job] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=lambda: [node("head", head=True, CPU=4)])
    token: str | None = None
    session: str = "session_1"
    piece: int = 1000
    closes: list[Close] = field(default_factory=list)
    answers: list[tuple[str, tuple[int, str] | None]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    deaf: bool = False  # like a dashboard process that died
    hidden: set[str] = field(default_factory=set)  # jobs that the next GET does not see yet
    on_submit: Callable[[Job], None] = lambda job: None
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 22)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """End all connections at once, as a killed process does."""
        for writer in self._writers:
            writer.transport.abort()

    def count(self, call: str) -> int:
        return sum(re.fullmatch(call, one) is not None for one in self.calls)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether another call may come on this connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        call = f"{method} {path.partition('?')[0]}"
        self.calls.append(call)
        self.headers.append(headers)
        if self.deaf:
            return False
        scripted = next((one for one in self.answers if re.fullmatch(one[0], call)), None)
        if scripted is not None:
            self.answers.remove(scripted)
            if scripted[1] is None:
                await asyncio.sleep(3600)
            assert scripted[1] is not None
            status, text = scripted[1]
        elif self.token and f"Bearer {self.token}" not in (
            headers.get("authorization"),
            headers.get("x-ray-authorization"),
        ):
            status, text = 401, "Unauthorized: Missing authentication token"
        elif path.endswith("/logs/tail") and (job := self.jobs.get(path.split("/")[3])) is not None:
            await self._tail(writer, headers["sec-websocket-key"], job, path.split("/")[3])
            return False
        else:
            status, text = self._answer(method, path.partition("?")[0], body)
        data = text.encode("utf-8", "surrogateescape")
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return True

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        if path == "/api/version":
            return 200, json.dumps({"version": "4", "ray_version": "2.60.0", "session_name": self.session})
        if path == "/api/v0/nodes":
            return 200, json.dumps({"result": True, "data": {"result": {"result": self.nodes}}})
        if path == "/api/jobs/":
            return self._submit(json.loads(body)) if method == "POST" else (200, json.dumps(self._list()))
        name, _, what = path.removeprefix("/api/jobs/").partition("/")
        job = self.jobs.get(name)
        if job is None or name in self.hidden:
            self.hidden.discard(name)
            return 404, f"Job {name} does not exist"
        if what == "logs":
            return 200, json.dumps({"logs": job.log})
        if what == "stop":
            if job.status not in TERMINAL:
                job.status, job.message = "STOPPED", "Job was intentionally stopped."
            return 200, '{"stopped": true}'
        if method == "DELETE":
            if job.status not in TERMINAL:
                return 500, f"Traceback\nRuntimeError: Attempted to delete job '{name}', but it is non-terminal.\n"
            del self.jobs[name]
            return 200, '{"deleted": true}'
        return 200, json.dumps(_details(name, job))

    def _submit(self, asked: dict[str, Any]) -> tuple[int, str]:
        name = asked["submission_id"]
        if name in self.jobs:
            return 500, "Exception: Request failed with status code 400: Traceback\n" + TWICE.format(name)
        entrypoint = asked["entrypoint"]
        job = Job(
            metadata=asked["metadata"],
            entrypoint=entrypoint,
            env=asked["runtime_env"]["env_vars"],
            log=f"Runtime env is setting up.\nRunning entrypoint for job {name}: {entrypoint}\n",
        )
        self.jobs[name] = job
        self.on_submit(job)
        return 200, json.dumps({"job_id": name, "submission_id": name})

    def _list(self) -> list[dict[str, Any]]:
        driver = {"submission_id": None, "type": "DRIVER", "status": "RUNNING", "entrypoint": "python x.py"}
        return [driver, *(_details(name, job) for name, job in self.jobs.items())]

    async def _tail(self, writer: asyncio.StreamWriter, key: str, job: Job, name: str) -> None:
        accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
        head = "HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
        writer.write(f"{head}{accept}\r\n\r\n".encode())
        close = self.closes.pop(0) if self.closes else Close(1 << 60)
        sent = 0
        while sent < close.after:
            piece = job.log[sent : min(sent + self.piece, close.after)]
            if piece:
                writer.write(_frame(1, piece.encode()))
                sent += len(piece)
                await writer.drain()
            elif job.status in TERMINAL or name not in self.jobs:
                break
            else:
                await asyncio.sleep(0.01)
        if close.code is None:
            writer.transport.abort()
            return
        writer.write(_frame(8, close.code.to_bytes(2, "big")))
        await writer.drain()


def node(name: str, head: bool = False, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As Ray's state API lists one."""
    total = {"memory": 1e9, f"node:{name}": 1.0, **resources}
    state = "ALIVE" if alive else "DEAD"
    return {
        "node_id": f"id-{name}",
        "node_ip": "10.0.0.1",
        "is_head_node": head,
        "state": state,
        "node_name": name,
        "resources_total": total,
    }


def _details(name: str, job: Job) -> dict[str, Any]:
    return {
        "type": "SUBMISSION",
        "submission_id": name,
        "status": job.status,
        "message": job.message,
        "error_type": job.error_type,
        "driver_exit_code": job.exit_code,
        "metadata": job.metadata,
        "entrypoint": job.entrypoint,
        "driver_node_id": job.node,
        "start_time": 1_000_000,
        "end_time": 2_000_000 if job.status in TERMINAL else None,
        "runtime_env": {"env_vars": job.env},
    }


def _frame(kind: int, content: bytes) -> bytes:
    size = len(content)
    if size < 126:
        return bytes([0x80 | kind, size]) + content
    if size < 1 << 16:
        return bytes([0x80 | kind, 126]) + size.to_bytes(2, "big") + content
    return bytes([0x80 | kind, 127]) + size.to_bytes(8, "big") + content
