"""A real Ray head with its dashboard on this machine, for tests: a supervised child in a session of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "CORRAL_TEST_HEAD"  # a variable that all processes of a head inherit, Ray's too
STARTED = 120.0  # seconds until a head has to answer, on a busy machine
STORE = 80_000_000
PORTS = 60  # of one node: a block of its own, as Ray picks ports before it binds them


@dataclass
class Head:
    """address: of the dashboard. temp: Ray's folder, short, as sockets lie below it. env: more variables for Ray.
    block: `ray start --block` ends everything when a part of it dies; without, the parts live on for themselves."""

    address: str
    temp: Path
    ports: int
    mark: str
    env: Mapping[str, str]
    block: bool = True
    process: subprocess.Popen[bytes] | None = None
    _dashboards: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def gcs(self) -> str:
        return f"127.0.0.1:{self.ports}"

    def start(self, cpus: int = 4, *more: str) -> None:
        """Start it, on the same ports as before; returns when the dashboard answers and has a node."""
        options = ["--head", "--port", str(self.ports), "--dashboard-port", str(self.ports + 1)]
        options += ["--dashboard-host", "127.0.0.1", "--ray-client-server-port", str(self.ports + 2)]
        options += ["--num-cpus", str(cpus), "--temp-dir", str(self.temp), *self._node(self.ports + 3), *more]
        self.process = self._run(options)
        until = time.monotonic() + STARTED
        while not self.answers():
            assert self.process.poll() is None or not self.block, f"the head ended: {self._log()}"
            assert time.monotonic() < until, f"the head does not answer: {self._log()}"
            time.sleep(0.1)

    def add_node(self, name: str, number: int, *options: str) -> subprocess.Popen[bytes]:
        """One more node, with a block of ports of its own; it ends with everything else."""
        at = ["--address", self.gcs, "--node-name", name, "--include-log-monitor", "false"]
        return self._run([*at, *self._node(self.ports + number * PORTS), *options])

    def find(self, *words: str) -> list[psutil.Process]:
        """Processes of this head whose command line has all the words."""
        found = []
        for process in _marked(self.mark):
            with suppress(psutil.Error):
                line = " ".join([process.name(), *process.cmdline()])
                if all(word in line for word in words):
                    found.append(process)
        return found

    def kill_dashboard(self) -> Callable[[], None]:
        """SIGKILL; what starts it again, with the same arguments."""
        (dashboard,) = self.find("dashboard/dashboard.py")
        command, env, folder = dashboard.cmdline(), dashboard.environ(), dashboard.cwd()
        dashboard.kill()
        dashboard.wait(10)

        def again() -> None:
            log = (self.temp / "start.log").open("ab")
            self._dashboards.append(
                subprocess.Popen(
                    command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip
            log.close()
            until = time.monotonic() + STARTED
            while not self.answers():
                assert time.monotonic() < until, "the dashboard does not come back"
                time.sleep(0.1)

        return again

    def stop(self) -> None:
        """End all of it. Nothing but processes with this head's mark, and their children, is signalled."""
        until = time.monotonic() + 20
        while left := _marked(self.mark):
            assert time.monotonic() < until, f"processes do not end: {left}"
            for process in left:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(left, timeout=0.2)
        for child in [*self._dashboards, *([self.process] if self.process else [])]:
            child.wait(10)

    def _run(self, options: list[str]) -> subprocess.Popen[bytes]:
        blocking = ["--block"] if self.block else []
        with open(self.temp / "start.log", "ab") as log:
            return subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), "start", "--disable-usage-stats", *blocking, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**_environment(), **self.env, MARK: self.mark},
            )

    def _node(self, base: int) -> list[str]:
        names = ("node-manager-port", "object-manager-port", "dashboard-agent-listen-port")
        names += ("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port", "min-worker-port")
        given = [word for at, name in enumerate(names) for word in (f"--{name}", str(base + at))]
        return [*given, "--max-worker-port", str(base + PORTS - 5), "--object-store-memory", str(STORE)]

    def answers(self) -> bool:
        """Whether the dashboard answers and knows of a node."""
        request = urllib.request.Request(f"{self.address}/api/v0/nodes")
        if token := self.env.get("RAY_AUTH_TOKEN"):
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return b'"ALIVE"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def _log(self) -> str:
        return (self.temp / "start.log").read_text(errors="replace")[-2000:]


@contextmanager
def ray_head(cpus: int = 4, env: Mapping[str, str] | None = None, *options: str, block: bool = True) -> Iterator[Head]:
    """A head that is up; nothing of it is left afterwards."""
    temp = Path(tempfile.mkdtemp(prefix="ch", dir="/tmp"))
    ports = _block()
    head = Head(f"http://127.0.0.1:{ports + 1}", temp, ports, f"{os.getpid()}-{temp.name}", dict(env or {}), block)
    try:
        head.start(cpus, *options)
        yield head
    finally:
        head.stop()
        shutil.rmtree(temp, ignore_errors=True)


def _block() -> int:
    """The first of 4 x PORTS ports that are free now, below those that the kernel gives out by itself."""
    span = 4 * PORTS
    start = 10_000 + os.getpid() * 7919 % 20_000
    for step in range(80):
        base = 10_000 + (start - 10_000 + step * span) % 20_000
        if all(_free(port) for port in (*range(base, base + 12), base + PORTS, base + 2 * PORTS)):
            return base
    raise AssertionError("no free ports")


def _free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _environment() -> dict[str, str]:
    """SPT_NOENV: Ray's processes rename themselves, and would overwrite the environment that holds the mark."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CORRAL_"))}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
