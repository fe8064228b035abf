"""A real service, real clients and real jobs as processes, and the faults that are injected into them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

BOUND = 60.0  # seconds; generous, as the machine may be busy
_FOREIGN = ("GITHUB_", "CORRAL_", "SUBMITTER", "RAY_")


def until(condition: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
    """What the condition gives as soon as that is true."""
    deadline = time.monotonic() + bound
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {bound:g} s"
        time.sleep(0.03)
    return found


def environment(**more: str) -> dict[str, str]:
    """As somebody has it who activated the environment these tests run in."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | path | more


# `corral` with a system clock that a test sets.
_SERVE = """
import pathlib, sys, time
clock, real = pathlib.Path(sys.argv.pop(1)), time.time
time.time = lambda: real() + float(clock.read_text() or 0)
from corral.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Service:
    """`corral serve` on one port and one data folder, through any number of kills and starts."""

    def __init__(self, root: Path, *options: object) -> None:
        self.root, self.data, self.port = root, root / "d", 0
        self.clock = root / "clock"  # seconds by which the system's clock is wrong, as the service sees it
        self.clock.write_text("0")
        self._options = [str(option) for option in options]
        self._prefix = hashlib.sha256(os.fsencode(self.data.resolve())).hexdigest()[:12] + "-"
        self._log = (root / "serve.log").open("ab")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", _SERVE, str(self.clock), "serve"]
        command += ["--port", str(self.port), "--data-dir", str(self.data)]
        self.process = subprocess.Popen(
            command + self._options, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("corral serve: http://"), (line, (self.root / "serve.log").read_text()[-2000:])
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.http = httpx.Client(base_url=self.url, timeout=BOUND, trust_env=False)

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self.process.kill()
        self._ended()

    def stop(self) -> int:
        self.process.terminate()
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(BOUND)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for process, _ in self._marked():
            with suppress(psutil.Error):
                process.kill()
        self._log.close()

    def log(self) -> str:
        return (self.root / "serve.log").read_text(encoding="utf-8", errors="replace")

    def job(self, job_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1/rayjobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def state(self, job_id: str) -> str:
        return str(self.job(job_id)["state"])

    def events(self, job_id: str, **query: str) -> list[dict[str, Any]]:
        """The whole watch of a job that is over."""
        answer = self.http.get(f"/api/v1/rayjobs/{job_id}/watch", params={"types": "all"} | query)
        assert answer.status_code == 200, answer.text
        found = [json.loads(line) for line in answer.text.splitlines() if line]
        assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
        assert [event["type"] for event in found].count("final") == 1
        assert found[-1]["type"] == "final"
        return found

    def attempt(self, job_id: str, number: int = 1) -> Path:
        return self.data / "jobs" / job_id / f"attempt-{number}"

    def processes(self, job_id: str = "", command: str = "") -> list[psutil.Process]:
        """Processes of a job (of all jobs without one) that run `python -m COMMAND`."""
        found = []
        for process, mark in self._marked():
            with suppress(psutil.Error):
                module = " ".join(process.cmdline()[1:])
                if mark.startswith(self._prefix + job_id) and module.startswith(f"-m {command}" if command else ""):
                    found.append(process)
        return found

    def _marked(self) -> list[tuple[psutil.Process, str]]:
        """By the variable that everything of a job inherits, read here without Corral's own code."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                match = re.search(rb"(?:^|\0)CORRAL_JOB_SUBMISSION=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
                if match and match[1].decode().startswith(self._prefix):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append((process, match[1].decode()))
        return found

    def one(self, job_id: str, command: str) -> psutil.Process:
        """The process of a job that runs `python -m COMMAND`, as soon as there is one."""
        found: list[psutil.Process] = until(lambda: self.processes(job_id, command), f"{command} of {job_id}")
        return found[0]

    def nothing_left(self, job_id: str, bound: float = 10.0) -> None:
        until(lambda: not self.processes(job_id), f"all processes of {job_id} are gone", bound)


class Client:
    """A `corral` process; what it prints is in files, so it is never held up."""

    def __init__(self, service: Service, folder: Path, *arguments: object, **env: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="client-", dir=folder))
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "corral", *map(str, arguments)],
                cwd=service.root / "source", stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment(CORRAL_URL=service.url, **env),
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8")

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def verdict(self) -> str:
        """What it said last."""
        return self.err.splitlines()[-1]

    @property
    def job_id(self) -> str:
        """As soon as the service has told it."""
        match = until(lambda: re.search(r"job (rj-[0-9a-f]{12})", self.err) or self._gone(), "the job has a name")
        return str(match[1])

    def _gone(self) -> None:
        assert self.process.poll() is None, self.err

    def printed(self, text: str, bound: float = BOUND) -> None:
        until(lambda: text in self.out or self._gone(), f"the client prints {text!r}", bound)

    def done(self, bound: float = BOUND) -> int:
        try:
            code = self.process.wait(bound)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the client did not end within {bound:g} s: {self.err[-2000:]}") from None
        assert "Traceback" not in self.err, self.err
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(BOUND)


class Place:
    """A service with a source folder, gates that hold scripts up, and clients that are ended with it."""

    def __init__(self, root: Path, *options: object) -> None:
        self.root, self.source, self.gates = root, root / "source", root / "gates"
        self.source.mkdir()
        self.gates.mkdir()
        self._clients: list[Client] = []
        self.service = Service(root, *options)

    def script(self, name: str, text: str) -> None:
        (self.source / name).write_text(text, encoding="utf-8")

    def submit(
        self, *options: object, script: str = "job.sh", arguments: tuple[object, ...] = (), **env: str
    ) -> Client:
        return self.client("submit", *options, "--env", f"GATES={self.gates}", "--", script, *arguments, **env)

    def client(self, *arguments: object, **env: str) -> Client:
        client = Client(self.service, self.root, *arguments, **env)
        self._clients.append(client)
        return client

    def open(self, gate: str) -> None:
        (self.gates / gate).touch()

    def reached(self, gate: str, bound: float = BOUND) -> None:
        until((self.gates / gate).exists, f"a script comes to {gate!r}", bound)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.service.close()


@contextmanager
def place(*options: object) -> Iterator[Place]:
    """In a folder with a short path, as sockets lie in it; everything of it is gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="cj-", dir="/tmp"))
    it = Place(root, *options)
    try:
        yield it
    finally:
        it.close()
        shutil.rmtree(root, ignore_errors=True)


def interrupt(client: Client) -> float:
    """SIGINT; when."""
    client.process.send_signal(signal.SIGINT)
    return time.monotonic()


def in_order(lines: list[str], prefix: str, count: int) -> None:
    """Each of `prefix 0`, `prefix 1`, ... once and in order, among other lines."""
    assert [line for line in lines if line.startswith(prefix + " ")] == [f"{prefix} {i}" for i in range(count)]
