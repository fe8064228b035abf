"""A real server on a port of its own, over a real store; jobs move only when a test moves them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from corral.job.backends.base import Capacity, Placement
from corral.job.backends.folder import attempt_folder, split
from corral.job.core.clock import Clock
from corral.job.protocol.agent import EndRecord, Heartbeat, LogBatch, LogChunk, Orders
from corral.job.protocol.states import FailureClass, JobState, Status
from corral.job.protocol.submit import Resources
from corral.job.protocol.verdict import Verdict
from corral.job.service.app import create_app
from corral.job.service.auth import agent_token, service_key
from corral.job.service.context import Service
from corral.job.service.journal import Journal
from corral.job.service.metrics import Metrics
from corral.job.service.server import Server, listen
from corral.job.service.settings import Settings
from corral.job.service.tokens import TokenFile
from corral.job.service.watch import Watchers
from corral.job.store.bundles import Bundles
from corral.job.store.store import Store

WAY = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)
DEADLINE = 20.0


class StillBackend:
    name = "still"
    remote = False

    def refusal(self, resources: Resources, placement: Placement) -> str | None:
        return "patches are refused here" if placement.patches else None

    def manifest(self, submission_id: str, resources: Resources, placement: Placement) -> str | None:
        return f"name: {submission_id}\n"

    def __init__(self, settings: Settings) -> None:
        self.capacity = Capacity(settings.devices, settings.max_nodes, settings.max_devices_per_node)
        self._data_dir = settings.data_dir

    def attempt_dir(self, submission_id: str) -> Path | None:
        folder = attempt_folder(self._data_dir, *split(submission_id))
        return folder if folder.is_dir() else None

    async def list_owned(self) -> list[str]:
        return []


class StillRunner:
    """Starts nothing; notes what it is told."""

    def __init__(self, settings: Settings) -> None:
        self.backend = StillBackend(settings)
        self.heard: list[Heartbeat] = []
        self.ended: list[EndRecord] = []
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    async def heartbeat(self, job_id: str, heard: Heartbeat) -> Orders:
        self.heard.append(heard)
        return Orders()

    async def end(self, job_id: str, record: EndRecord) -> None:
        self.ended.append(record)


class Running:
    def __init__(self, service: Service, server: Server, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.service, self.server, self.loop, self.url = service, server, loop, url
        self.store, self.runner = service.journal.store, service.runner
        self.http = httpx.Client(base_url=url, timeout=DEADLINE)
        self.thread = threading.current_thread()

    def stop(self) -> None:
        """As a signal does it; returns when the service has ended."""
        self.server.should_exit = True
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "the server did not end"

    def call(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(DEADLINE)

    def write(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.call(self.service.journal.write(change, *args, **kwargs))

    def submit(self, **fields: Any) -> str:
        """A job that could run; its id."""
        body = {"script": "run.sh", "bundle": self.bundle(), **fields}
        answer = self.http.post("/api/v1/rayjobs", json=body)
        assert answer.status_code in {200, 201}, answer.text
        return str(answer.json()["job_id"])

    def bundle(self, names: tuple[str, ...] = ("run.sh", "examples/train.sh")) -> str:
        digest, content = bundle(names)
        if self.http.head(f"/api/v1/bundles/{digest}").status_code != 200:
            answer = self.http.put(f"/api/v1/bundles/{digest}", content=content)
            assert answer.status_code in {200, 201}, answer.text
        return digest

    def move(self, job_id: str, *states: JobState, verdict: Verdict | None = None) -> None:
        for state in states:
            job = self.store.get(job_id)
            changes = {"verdict": verdict} if verdict is not None and job.verdict is None else {}
            self.write(self.store.transition, job, state, message=state.value.lower(), **changes)

    def run(self, job_id: str) -> None:
        self.move(job_id, *WAY)

    def end(self, job_id: str, status: Status, **fields: Any) -> None:
        """The rest of the way for a job that runs."""
        fields = {"cause": "exit_code", "message": f"it {status.value}", **fields}
        verdict = Verdict(status=status, **fields)
        self.move(job_id, JobState.COLLECTING, verdict=verdict)
        self.move(job_id, JobState.CLEANING, JobState(status.value))

    def lines(self, job_id: str, lines: list[str], source: str = "driver", rank: int | None = None) -> None:
        """Store lines through the agent's route."""
        start = self.store.watermarks(job_id, 1).get(source, 0)
        offsets = [start + sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
        end = start + sum(len(line) + 1 for line in lines)
        node = None if rank is None else 0
        chunk = LogChunk(source=source, node=node, rank=rank, start=start, end=end, lines=lines, offsets=offsets)
        answer = self.agent("POST", job_id, "logs", LogBatch(attempt=1, chunks=[chunk]).model_dump())
        assert answer.status_code == 200, answer.text

    def agent(self, method: str, job_id: str, what: str, body: object = None, **kwargs: Any) -> httpx.Response:
        token = agent_token(self.service.agent_key, job_id)
        headers = {"Authorization": f"Bearer {token}"}
        return self.http.request(method, f"/api/v1/agent/{job_id}/{what}", json=body, headers=headers, **kwargs)

    def events(self, job_id: str, **query: Any) -> list[dict[str, Any]]:
        """The whole watch of a job that is over."""
        import json

        answer = self.http.get(f"/api/v1/rayjobs/{job_id}/watch", params={"types": "all"} | query)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines() if line]


def bundle(names: tuple[str, ...]) -> tuple[str, bytes]:
    """(digest, content) of an archive with these files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name in names:
            content = f"echo {name}\n".encode()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), mtime=0)
    return hashlib.sha256(content).hexdigest(), content


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE} s"
        time.sleep(0.01)


def failure(**fields: Any) -> dict[str, Any]:
    return {"failure_class": FailureClass.USER, "exit_code": 3, **fields}


@contextmanager
def running(data_dir: Path, keep_alive: float = 15.0, listen_on: int = 0, **changes: Any) -> Iterator[Running]:
    """Serve in a thread of this process; ended in good order when the block ends."""
    data_dir.mkdir(exist_ok=True)
    settings = replace(Settings(data_dir), **changes)
    ready: list[Running] = []
    failed: list[BaseException] = []

    async def main() -> None:
        with listen("127.0.0.1", listen_on) as listener:
            port = listener.getsockname()[1]
            at = replace(settings, port=port)
            clock = Clock()
            journal = Journal(Store(None, data_dir, clock))
            tokens = None if at.token_file is None else TokenFile(at.token_file)
            watchers = Watchers(at.limits.watchers, keep_alive)
            key, bundles = service_key(data_dir), Bundles(data_dir, at.limits.bundle, at.limits.unpacked)
            runner = StillRunner(at)
            service = Service(at, journal, runner, bundles, clock, tokens, key, watchers, Metrics())
            server = Server(create_app(service), watchers.stop)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.005)
            ready.append(Running(service, server, asyncio.get_running_loop(), at.url))
            await serving
            await journal.close()

    def thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
            raise

    serving = threading.Thread(target=thread, daemon=True)
    serving.start()
    until(lambda: ready or failed, "the server starts")
    assert not failed, failed
    with ready[0].http:
        ready[0].thread = serving
        try:
            yield ready[0]
        finally:
            ready[0].stop()
