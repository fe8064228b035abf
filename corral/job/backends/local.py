"""Jobs on this machine: each has Ray nodes of its own under `corral cluster local`, which starts and ends all of it.

A job of one node with one device gets no Ray, unless it asks for a head of its own: a world of one process needs none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from corral import platform
from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.backends import marks
from corral.job.backends.base import ANY, Capacity, Observation, Placement, Presence
from corral.job.protocol.agent import AgentSpec, EndRecord, Heartbeat
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings

HOST = "host.json"
HOST_LOG = "host.log"  # what `corral cluster local` and the agent itself print
SUPERVISOR_BOUND = 6.0  # seconds its supervisor gets to end a job in good order
LOOK = 0.1  # seconds between looks at a host that was told to end
KILL_BOUND = 10.0  # seconds after which a process that does not die of SIGKILL is reported
_RESOURCES = {"cpu": platform.CPU, "gpu": platform.CUDA, "npu": platform.NPU}
# What belongs to the service, or to a run the service itself was started from.
_DROPPED = (
    *("RAY_", "CORRAL_TOKEN", "CORRAL_JOB_", "CORRAL_SERVICE", "CORRAL_DATABASE", "CORRAL_AGENT_", "CORRAL_URL"),
    *("CORRAL_RUN_DIR", "CORRAL_RANK_OUTPUT", "SUBMITTER_", "GITHUB_TOKEN", "ACTIONS_", "PGPASS"),
)


@dataclass(frozen=True)
class Host:
    """The process `corral cluster local` of a submission. started: see marks.started. removed: destroyed, for good."""

    pid: int
    started: str
    removed: bool = False

    def runs(self) -> bool:
        return not self.removed and marks.started(self.pid) == self.started


class LocalBackend:
    """See backends.base.Backend."""

    name = "local"
    remote = False

    def __init__(self, settings: Settings) -> None:
        self.capacity = Capacity(settings.devices, settings.max_nodes, settings.max_devices_per_node)
        self._data_dir = settings.data_dir.resolve()
        self._kind = settings.profile.kind
        self._prefix = hashlib.sha256(os.fsencode(self._data_dir)).hexdigest()[:12] + "-"
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._removed: set[str] = set()  # so that each is looked up once
        self._kills: dict[str, asyncio.Task[None]] = {}

    def refusal(self, resources: Resources, placement: Placement) -> str | None:
        asked = [name for name in ("cpu", "memory", "shm") if getattr(resources, name) is not None]
        asked += ["template_patches"] if placement.patches else []
        if asked:
            return f"{', '.join(asked)}: jobs here run on this machine as it is; leave it out, or use a cluster"
        return None

    def manifest(self, submission_id: str, resources: Resources, placement: Placement) -> str | None:
        return None

    async def fetch(self, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        return None

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
        async with self._locks[spec.submission_id]:
            await asyncio.to_thread(self._provision, spec, resources, placement.head)

    async def observe(self, submission_id: str) -> Observation:
        folder = self._folder(submission_id)
        host = _read_host(folder) if folder else None
        if folder is None or (host is not None and host.removed):
            return Observation(Presence.ABSENT)
        if host is None:
            some = await asyncio.to_thread(marks.marked, self._mark(submission_id))
            return Observation(Presence.STARTING if some else Presence.ABSENT)
        if host.runs():
            if (folder / files.AGENT_LOG).exists() or (folder / files.DRIVER_LOG).exists():
                return Observation(Presence.ACTIVE, rayjob_status="RUNNING", job_deployment_status="Running")
            return Observation(Presence.STARTING, job_deployment_status="Initializing")
        code = self._reap(host.pid)
        status, deployment = ("SUCCEEDED", "Complete") if code == 0 else ("FAILED", "Failed")
        return Observation(Presence.ENDED, _last_words(folder, code), code, status, deployment)

    async def stop(self, submission_id: str, grace: float) -> None:
        """SIGTERM goes to `corral cluster local`, which passes it on to the agent, and the agent to the command."""
        if self._folder(submission_id) is None or submission_id in self._kills:
            return
        task = asyncio.create_task(self._stop(submission_id, grace))
        self._kills[submission_id] = task
        task.add_done_callback(lambda _: self._kills.pop(submission_id, None))

    async def destroy(self, submission_id: str) -> None:
        if (kill := self._kills.get(submission_id)) is not None:
            kill.cancel()
        if (folder := self._folder(submission_id)) is not None:
            async with self._locks[submission_id]:
                await asyncio.to_thread(self._destroy, folder, self._mark(submission_id))
            self._locks.pop(submission_id, None)

    async def list_owned(self) -> list[str]:
        return await asyncio.to_thread(self._list_owned)

    async def end_record(self, submission_id: str) -> EndRecord | None:
        known, folder = files.split(submission_id), self._folder(submission_id)
        return files.read_end(folder, *known) if known and folder else None

    def attempt_dir(self, submission_id: str) -> Path | None:
        folder = self._folder(submission_id)
        return folder if folder is not None and folder.is_dir() else None

    # In threads -----------------------------------------------------------------------------------------------------

    def _provision(self, spec: AgentSpec, resources: Resources, head: str) -> None:
        self.capacity.check(resources)
        folder, mark = self._folder(spec.submission_id), self._mark(spec.submission_id)
        if folder is None:
            raise ConfigError(f"{spec.submission_id!r} is not the id of a submission")
        if _read_host(folder) is not None or (folder / files.END).exists():
            return
        files.write_spec(folder, spec)
        host = _host_among(marks.marked(mark)) or self._start(folder, mark, resources, head)
        files.write_private(folder / HOST, json.dumps(asdict(host)) + "\n")

    def _start(self, folder: Path, mark: str, resources: Resources, head: str) -> Host:
        """Nothing of the submission runs with a host; what is left of an earlier try without one is ended."""
        self._end_all(mark)
        command = [sys.executable, "-m", "corral", "cluster", "local", *self._topology(resources, head)]
        command += ["--temp-dir", str(_temp_dir(mark)), "--", sys.executable, "-m", "corral.job.agent", str(folder)]
        try:
            with open(os.open(folder / HOST_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=_clean(os.environ) | {marks.MARK: mark} | marks.KEEP_ENVIRONMENT,
                    start_new_session=True,
                )
        except OSError as error:
            raise InfraError(f"cannot start a local job: {error.strerror}; free memory or processes") from error
        self._children[child.pid] = child
        return Host(child.pid, marks.started(child.pid) or "gone")

    def _topology(self, resources: Resources, head: str) -> list[str]:
        nodes = 0 if resources.devices == 1 and head == "shared" else resources.nodes
        kind = resources.kind if resources.kind != "auto" else self._kind
        facts = _RESOURCES.get(kind) or platform.detect()
        devices = ["--devices", str(resources.accelerators_per_node), "--resource", facts.ray_resource]
        return ["--nodes", str(nodes), *devices, "--head", head]

    def _destroy(self, folder: Path, mark: str) -> None:
        host = _read_host(folder)
        self._end_all(mark)
        if host is not None:
            self._reap(host.pid)
            self._children.pop(host.pid, None)
        if folder.is_dir():
            gone = Host(0, "gone") if host is None else host
            files.write_private(folder / HOST, json.dumps(asdict(gone) | {"removed": True}) + "\n")

    def _end_all(self, mark: str) -> None:
        """First in good order, by the supervisor, then with SIGKILL. Raises InfraError for what does not die."""
        supervisors = [process for process in marks.marked(mark) if "corral.workers.supervisor" in _argv(process)]
        if supervisors:
            marks.send(supervisors, signal.SIGTERM)
            marks.await_gone(mark, SUPERVISOR_BOUND)
        if left := marks.kill_all(mark, KILL_BOUND):
            pids = ", ".join(str(process.pid) for process in left)
            raise InfraError(f"processes of a job do not end after SIGKILL: pid {pids}; look at the devices they use")
        shutil.rmtree(_temp_dir(mark), ignore_errors=True)

    def _list_owned(self) -> list[str]:
        kept: set[str] = set()
        for name, folder in files.submissions(self._data_dir).items():
            if name not in self._removed and (host := _read_host(folder)) is not None:
                (self._removed if host.removed else kept).add(name)
        return sorted(kept | {mark.removeprefix(self._prefix) for _, mark in marks.marks(self._prefix)})

    async def _stop(self, submission_id: str, grace: float) -> None:
        mark, folder = self._mark(submission_id), self._folder(submission_id)
        host = _read_host(folder) if folder else None
        every = await asyncio.to_thread(marks.marked, mark)
        # The note lies where the job can write: only a process with the mark is believed to be the host.
        if host is not None and host.runs() and (chosen := [each for each in every if each.pid == host.pid]):
            marks.send(chosen, signal.SIGTERM)
            end = time.monotonic() + grace
            while host.runs() and time.monotonic() < end:
                await asyncio.sleep(LOOK)
            if host.runs():
                await asyncio.to_thread(marks.kill_all, mark, KILL_BOUND)
            return
        # Its supervisor ends what is left, unless that was killed too.
        marks.send(every, signal.SIGTERM)
        if not await asyncio.to_thread(marks.await_gone, mark, grace):
            await asyncio.to_thread(marks.kill_all, mark, KILL_BOUND)

    # Facts ----------------------------------------------------------------------------------------------------------

    def _mark(self, submission_id: str) -> str:
        return self._prefix + submission_id

    def _folder(self, submission_id: str) -> Path | None:
        known = files.split(submission_id)
        return files.attempt_folder(self._data_dir, *known) if known else None

    def _reap(self, pid: int) -> int | None:
        """The exit code of a host that has ended, 128 + n for signal n; None when another process was its parent."""
        child = self._children.get(pid)
        code = child.poll() if child is not None else None
        return code if code is None or code >= 0 else 128 - code


def _read_host(folder: Path) -> Host | None:
    """None when there is none, or none that could be one: the job may write there too."""
    try:
        said = json.loads(files.read(folder / HOST))
        host = Host(int(said["pid"]), str(said["started"]), bool(said["removed"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return host if 0 <= host.pid < 1 << 31 else None


def _host_among(processes: list[psutil.Process]) -> Host | None:
    """A host that a service started and did not live to write down."""
    for process in processes:
        if _argv(process)[1:5] == ["-m", "corral", "cluster", "local"] and (begun := marks.started(process.pid)):
            return Host(process.pid, begun)
    return None


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _last_words(folder: Path, code: int | None) -> str:
    text = files.read(folder / HOST_LOG)[-4096:].decode("utf-8", "replace")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    ended = "its local nodes have ended" + ("" if code is None else f" with exit code {code}")
    return f"{ended}: {said[-1][:300]}" if said else ended


def _temp_dir(mark: str) -> Path:
    """A function of the mark, so that it is found and removed whoever is killed when. Short: sockets lie below it."""
    parent = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= 20 else "/tmp"
    return Path(parent) / f"corral-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"


def _clean(environ: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(_DROPPED)}
