"""A service of the agent's routes that keeps what it is sent, and fails in whatever way a test asks for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# What may happen to a request. before: nothing is done, no answer. lose: done, no answer. cut: done, half an answer.
# again: done twice by a proxy that repeats. hang: nothing for longer than the agent waits.
FAULTS = ("before", "lose", "cut", "500", "503", "garbage", "again")
Fault = Callable[[str], str | None]


class RecordingService:
    """Storage and server are apart: `stop` and `start` are a restart of the service on the same port."""

    def __init__(self, token: str = "token-of-the-agent") -> None:
        self.token = token
        self.stored: dict[str, list[tuple[int, str]]] = defaultdict(list)  # source → (offset, line)
        self.watermarks: dict[str, int] = {}
        self.heartbeats: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.joins: list[dict[str, Any]] = []
        self.secrets: dict[str, str] = {}
        self.join_status = 200
        self.source = b""  # what is sent as the bundle
        self.records = b""  # the last archive that came whole
        self.orders: dict[str, Any] | int = {"stop": False, "grace": 1.0}
        self.refused: list[str] = []
        self.fault: Fault = lambda what: None
        self.changed = threading.Condition()
        self._port = 0
        self._server: _Server | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.service = self
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """All connections are reset, as when the process is killed."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            for connection in list(self._server.connections):
                _reset(connection)
            self._server = None

    def lines(self, source: str) -> list[str]:
        return [line for _, line in self.stored[source]]

    def phases(self) -> list[str]:
        return list(dict.fromkeys(beat["phase"] for beat in self.heartbeats))

    def wait_for(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "not in time"

    # Routes ---------------------------------------------------------------------------------------------------------

    def logs(self, body: dict[str, Any]) -> tuple[int, Any]:
        at = dict(self.watermarks)
        for chunk in body["chunks"]:
            assert len(chunk["lines"]) == len(chunk["offsets"]) > 0
            if chunk["end"] <= at.get(chunk["source"], 0):
                continue
            if chunk["start"] != at.get(chunk["source"], 0):
                self.refused.append(f"{chunk['source']} {chunk['start']} at {at}")
                return 409, {"watermarks": self.watermarks}
            at[chunk["source"]] = chunk["end"]
        for chunk in body["chunks"]:
            if chunk["end"] > self.watermarks.get(chunk["source"], 0):
                self.stored[chunk["source"]] += zip(chunk["offsets"], chunk["lines"], strict=True)
        self.watermarks = at
        return 200, {"watermarks": self.watermarks}

    def answer(self, what: str, body: Any) -> tuple[int, Any]:
        with self.changed:
            self.changed.notify_all()
            if what == "logs":
                return self.logs(body)
            if what == "heartbeat":
                self.heartbeats.append(body)
                return (self.orders, {}) if isinstance(self.orders, int) else (200, self.orders)
            if what == "preflight":
                self.reports.append(body)
                return 204, None
            if what == "join":
                self.joins.append(body)
                return self.join_status, {"secrets": self.secrets} if self.join_status == 200 else {"error": "not now"}
            if what == "bundle":
                return 200, self.source
            if what == "records":
                self.records = body
                return 204, None
            if what == "end":
                self.ends.append(body)
                return 204, None
            return 200, {"watermarks": self.watermarks}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    service: RecordingService

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # reset connections are what these tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._do(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._do(json.loads(data))

    def do_PUT(self) -> None:
        assert self.headers["Transfer-Encoding"] == "chunked"
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        self._do(data)

    def _do(self, body: Any) -> None:
        service = self.server.service
        _, api, version, agent, _, what = urlsplit(self.path).path.split("/")
        assert (api, version, agent) == ("api", "v1", "agent")
        if self.headers["Authorization"] != f"Bearer {service.token}":
            return self._send(401, {"error": "no"})
        fault = service.fault(what)
        if fault == "hang":
            time.sleep(7)
        if fault in ("hang", "before"):
            return self._drop()
        if fault in ("500", "503"):
            return self._send(int(fault), {"error": "later"})
        if fault == "garbage":
            return self._send(200, ["neither", "this", "nor", "that"])
        status, answer = service.answer(what, body)
        if fault == "again":
            status, answer = service.answer(what, body)
        if fault == "lose":
            return self._drop()
        return self._send(status, answer, half=fault == "cut")

    def _send(self, status: int, answer: Any, half: bool = False) -> None:
        data = b"" if answer is None else answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        whole = head + data if status != 204 else b"HTTP/1.1 204 X\r\n\r\n"
        self.wfile.write(whole[: len(whole) - 3] if half else whole)
        if half:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        _reset(self.connection)

    def log_message(self, *args: Any) -> None:
        pass


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write_url(folder: Path, url: str) -> None:
    (folder / "service.json").write_text(json.dumps({"url": url}))
