"""What answers like the dashboard of a Ray head, without Ray: jobs are processes of this machine, their output a file.

It speaks REST alone; the socket of the logs is not there, as behind a proxy that does not pass it on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

STOP_BOUND = 4.0  # seconds a stopped job gets at most, as tests have no time
MARK = "CORRAL_TEST_POD"  # a variable that all processes of a pod inherit


@dataclass
class Job:
    """status: what is said instead of what is, None: the truth."""

    submission: Mapping[str, Any]
    log: Path
    process: subprocess.Popen[bytes] | None
    start: float = field(default_factory=time.time)
    stopped: bool = False
    status: str | None = None
    error_type: str | None = None
    exit_code: int | None = None
    message: str = ""

    def told(self) -> dict[str, Any]:
        code = self.process.poll() if self.process is not None else self.exit_code
        status = self.status or ("STOPPED" if self.stopped else "SUCCEEDED" if code == 0 else "FAILED")
        if self.status is None and self.process is not None and code is None:
            status = "RUNNING"
        failed = status == "FAILED"
        error = self.error_type or ("JOB_ENTRYPOINT_COMMAND_ERROR" if failed else None)
        return {
            "type": "SUBMISSION",
            "submission_id": self.submission["submission_id"],
            "status": status,
            "message": self.message or (f"Job entrypoint command failed with exit code {code}" if failed else ""),
            "error_type": error,
            "start_time": int(self.start * 1000),
            "end_time": None,
            "metadata": self.submission.get("metadata") or {},
            "runtime_env": self.submission.get("runtime_env") or {},
            "driver_exit_code": code if status in ("SUCCEEDED", "FAILED") and self.error_type is None else None,
        }


class FakeDashboard:
    """env: of the head's container, which its jobs inherit. nodes: what it says of its nodes, changed by tests.
    submissions: ids in the order in which they were given to it. silent: requests get no answer. runs: jobs are
    processes; otherwise they are RUNNING until a test says otherwise. token: asked of every request."""

    def __init__(self, env: Mapping[str, str], *, runs: bool = True, token: str = "") -> None:
        self.env, self.runs, self.token = dict(env), runs, token
        self.nodes: list[dict[str, Any]] = []
        self.jobs: dict[str, Job] = {}
        self.submissions: list[str] = []
        self.silent = threading.Event()
        self.over = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="fd-"))
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"dashboard": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """As the pod ends: all of its processes with it."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            if job.process is not None:
                _signal(job.process, signal.SIGKILL)
                job.process.wait(10)
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def submit(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        with self._lock:
            name = str(body["submission_id"])
            if name in self.jobs:
                return 500, {"result": False, "msg": f"ValueError: Job with submission_id {name} already exists."}
            self.submissions.append(name)
            log = self._folder / f"{name}.log"
            variables = (body.get("runtime_env") or {}).get("env_vars") or {}
            process = None
            if self.runs:
                with log.open("wb") as out:
                    process = subprocess.Popen(
                        ["bash", "-c", str(body["entrypoint"])],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        cwd=self._folder,
                        env={**_plain(), **self.env, **variables, MARK: name},
                        start_new_session=True,
                    )
            self.jobs[name] = Job(body, log, process, status=None if self.runs else "RUNNING")
            return 200, {"job_id": name, "submission_id": name}

    def stop(self, name: str) -> None:
        job = self.jobs[name]
        if job.process is None:
            job.status, job.stopped = "STOPPED", True
        elif job.process.poll() is None and not job.stopped:
            variables = self.env | ((job.submission.get("runtime_env") or {}).get("env_vars") or {})
            wait = min(STOP_BOUND, float(variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3)))
            threading.Thread(target=_end, args=(job, wait), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    dashboard: FakeDashboard
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        it = self.dashboard
        while it.silent.is_set() and not it.over.is_set():
            time.sleep(0.02)
        if it.over.is_set():  # the connection dies with the pod
            self.close_connection = True
            return
        if it.token and f"Bearer {it.token}" not in (
            self.headers.get("Authorization"),
            self.headers.get("X-Ray-Authorization"),
        ):
            self._answer(401, "Unauthorized")
            return
        match [self.command, *urlsplit(self.path).path.strip("/").split("/")]:
            case ["GET", "api", "version"]:
                self._answer(200, {"ray_version": "2.60.0", "session_name": f"session-{it.port}"})
            case ["GET", "api", "v0", "nodes"]:
                self._answer(200, {"result": True, "data": {"result": {"result": it.nodes}}})
            case ["GET", "api", "jobs"]:
                self._answer(200, [job.told() for job in it.jobs.values()])
            case ["POST", "api", "jobs"]:
                self._answer(*it.submit(json.loads(body)))
            case [_, "api", "jobs", name, *_] if name not in it.jobs:
                self._answer(404, f"Job {name} does not exist.")
            case ["GET", "api", "jobs", name]:
                self._answer(200, it.jobs[name].told())
            case ["GET", "api", "jobs", name, "logs"]:
                log = it.jobs[name].log
                self._answer(200, {"logs": log.read_text("utf-8", "replace") if log.exists() else ""})
            case ["POST", "api", "jobs", name, "stop"]:
                it.stop(name)
                self._answer(200, {"stopped": True})
            case ["DELETE", "api", "jobs", name]:
                del it.jobs[name]
                self._answer(200, {"deleted": True})
            case _:
                self._answer(404, "404: Not Found")

    def _answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        pass


def _end(job: Job, seconds: float) -> None:
    """As Ray does: SIGTERM to all of it, and SIGKILL after a while."""
    assert job.process is not None
    _signal(job.process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(seconds)
    _signal(job.process, signal.SIGKILL)
    job.process.wait()
    job.stopped = True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _plain() -> dict[str, str]:
    """What a container would have, as far as this machine's Python needs it."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "PYTHONPATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"OMP_NUM_THREADS": "1"}
