"""The local backend: the contract of all backends, and what happens when its processes are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from corral.errors import ConfigError
from corral.job.backends import marks
from corral.job.backends.base import Placement, Presence
from corral.job.backends.local import LocalBackend
from corral.job.protocol.agent import AgentSpec
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings
from tests.job.backends.contract import ONE, BackendContract, DeafService, Place, ended, until, until_presence


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Whatever a test leaves is ended by the test's own marks."""
    (tmp_path / "work").mkdir()
    settings = Settings(data_dir=tmp_path / "data", devices=8, max_nodes=2, max_devices_per_node=4)
    with DeafService() as service:
        yield Place(lambda: LocalBackend(settings), service.url, tmp_path / "work")
        backend = LocalBackend(settings)
        for name in asyncio.run(backend.list_owned()):
            asyncio.run(backend.destroy(name))


class TestLocalBackend(BackendContract):
    pass


def below(place: Place, spec: AgentSpec) -> dict[str, psutil.Process]:
    """The marked processes of a submission, by what they are."""
    parts = {"corral.workers.supervisor": "supervisor", "corral.job.agent": "agent", "corral": "host"}
    found: dict[str, psutil.Process] = {}
    for process in marks.marked(mark_of(place, spec)):
        with suppress(psutil.NoSuchProcess):
            module = process.cmdline()[2:3]
            found[parts.get(module[0] if module else "", f"command {process.pid}")] = process
    return found


def mark_of(place: Place, spec: AgentSpec) -> str:
    return LocalBackend(Settings(data_dir=place.folder.parent / "data"))._mark(spec.submission_id)


STRAY = "setsid bash -c \"trap '' TERM; while :; do sleep 0.05; done\" &"  # of a session of its own, and stubborn


async def running(place: Place, script: str = "") -> tuple[LocalBackend, AgentSpec]:
    spec = place.spec(f"{script} touch {place.folder}/began; echo said; while :; do sleep 0.05; done")
    backend = LocalBackend(Settings(data_dir=place.folder.parent / "data"))
    await backend.provision(spec, ONE)
    await until((place.folder / "began").exists)
    return backend, spec


@pytest.mark.parametrize("victim", ["agent", "host", "supervisor"])
def test_killing_a_part_ends_the_job_and_leaves_nothing(place: Place, victim: str) -> None:
    async def life() -> None:
        backend, spec = await running(place, STRAY)
        parts = below(place, spec)
        assert len(parts) >= 6
        parts[victim].send_signal(signal.SIGKILL)
        await until_presence(backend, spec.submission_id, Presence.ENDED)
        assert await backend.end_record(spec.submission_id) is None or victim == "host"
        await backend.destroy(spec.submission_id)
        assert (await backend.observe(spec.submission_id)).presence is Presence.ABSENT
        assert below(place, spec) == {}
        assert not any(process.is_running() and process.status() != "zombie" for process in parts.values())

    asyncio.run(life())


def test_killing_host_and_supervisor_together_leaves_nothing(place: Place) -> None:
    async def life() -> None:
        backend, spec = await running(place, STRAY)
        parts = below(place, spec)
        parts["supervisor"].kill()
        parts["host"].kill()
        await until_presence(backend, spec.submission_id, Presence.ENDED)
        assert parts["agent"].is_running()
        await backend.stop(spec.submission_id, 0.5)
        await until(lambda: not below(place, spec))
        await backend.destroy(spec.submission_id)
        assert await backend.list_owned() == []

    asyncio.run(life())


def test_a_start_that_was_not_written_down_is_found_by_its_mark(place: Place) -> None:
    """The service was killed between the start of the process and its note about it."""

    async def life() -> None:
        backend, spec = await running(place)
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        note = json.loads((folder / "host.json").read_text())
        (folder / "host.json").unlink()
        later = place.make()
        assert await later.list_owned() == [spec.submission_id]
        assert (await later.observe(spec.submission_id)).presence is Presence.STARTING
        await later.provision(spec, ONE)
        assert json.loads((folder / "host.json").read_text()) == note
        await later.destroy(spec.submission_id)
        assert below(place, spec) == {}

    asyncio.run(life())


def test_foreign_processes_are_never_touched(place: Place) -> None:
    """Not one whose pid stands in a note by chance, not one of another service, not one with a similar mark."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    spec = place.spec("exit 0")

    async def life(foreign: list[subprocess.Popen[bytes]]) -> None:
        backend = LocalBackend(Settings(data_dir=place.folder.parent / "data"))
        await backend.provision(spec, ONE)
        await ended(backend, spec.submission_id)
        await until_presence(backend, spec.submission_id, Presence.ENDED)
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        note = json.loads((folder / "host.json").read_text())
        (folder / "host.json").write_text(json.dumps(note | {"pid": foreign[0].pid}))
        assert (await place.make().observe(spec.submission_id)).presence is Presence.ENDED
        later = place.make()
        await later.stop(spec.submission_id, 0.0)
        await later.destroy(spec.submission_id)
        assert [process.poll() for process in foreign] == [None, None, None]

    async def lied_to() -> None:
        """The job itself wrote the note, with all that makes a process look like a host."""
        backend, spec = await running(place)
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        note = {"pid": foreign[0].pid, "started": marks.started(foreign[0].pid), "removed": False}
        (folder / "host.json").write_text(json.dumps(note))
        await backend.stop(spec.submission_id, 0.0)
        await until(lambda: not below(place, spec))
        await backend.destroy(spec.submission_id)
        assert [process.poll() for process in foreign] == [None, None, None]

    own = mark_of(place, spec)
    signs = ["", f"0123456789ab-{spec.submission_id}", f"{own}1"]
    foreign = [subprocess.Popen(sleeper, env={**os.environ, marks.MARK: sign}) for sign in signs]
    try:
        asyncio.run(life(foreign))
        shutil.rmtree(place.folder.parent / "data")
        asyncio.run(lied_to())
    finally:
        for process in foreign:
            process.kill()
            process.wait()


def test_the_folder_is_closed_and_the_environment_clean(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets lie in the folder; what belongs to the service is not the job's."""
    for name in (
        "CORRAL_TOKEN",
        "CORRAL_TOKEN_FILE",
        "RAY_ADDRESS",
        "CORRAL_DATABASE_URL",
        "CORRAL_JOB_ID",
        "CORRAL_URL",
    ):
        monkeypatch.setenv(name, "of-the-service")
    spec = place.spec("env; umask").model_copy(update={"env": {"ASKED": "for"}, "secrets": {"KEY": "s3cret"}})

    async def life() -> None:
        backend = place.make()
        await backend.provision(spec, ONE)
        assert (await ended(backend, spec.submission_id)).exit_code == 0
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        for path in [folder, *folder.iterdir()]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        env = (folder / "driver.log").read_text()
        assert "of-the-service" not in env
        assert "ASKED=for" in env
        assert f"CORRAL_JOB_ID={spec.job_id}\n" in env
        assert "RAY_ADDRESS" not in env
        await backend.destroy(spec.submission_id)

    asyncio.run(life())


def test_more_than_there_is_can_never_be_started(place: Place) -> None:
    asked = Resources(nodes=3, accelerators_per_node=1)
    with pytest.raises(ConfigError, match="3 nodes of 1 devices never fit: this service has 8 devices"):
        asyncio.run(place.make().provision(place.spec("exit 0"), asked))


@pytest.mark.slow
def test_nodes_of_ray_come_and_go_with_their_job(place: Place) -> None:
    two = Resources(nodes=2, accelerators_per_node=2, kind="npu")
    code = (
        "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR'); "
        "print(ray.cluster_resources()['NPU'], flush=True); import time; time.sleep(600)"
    )
    spec = place.spec(f'exec {sys.executable} -c "{code}"')

    async def life() -> None:
        backend = place.make()
        await backend.provision(spec, two)
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        assert (await backend.observe(spec.submission_id)).presence is Presence.STARTING
        await until(lambda: (folder / "driver.log").exists() and "4.0" in (folder / "driver.log").read_text(), 120)
        parts = below(place, spec)
        temp = Path(next(word for word in parts["host"].cmdline() if "/corral-" in word))
        assert temp.is_dir()
        assert sum("raylet" in process.name() for process in parts.values()) == 2
        for part in ("host", "supervisor"):
            parts[part].kill()
        await backend.destroy(spec.submission_id)
        assert below(place, spec) == {}
        assert not temp.exists()

    asyncio.run(life())


@pytest.mark.slow
@pytest.mark.parametrize(("head", "seen"), [("shared", "no cluster"), ("separate", "['head', 'node-0']")])
def test_a_head_of_its_own_is_started_where_it_is_asked_for(place: Place, head: str, seen: str) -> None:
    """One node of one device has no cluster otherwise."""
    code = (
        "import os, ray\n"
        "if 'RAY_ADDRESS' not in os.environ: raise SystemExit('no cluster')\n"
        "ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, logging_level='ERROR')\n"
        "print(sorted(node['NodeName'] for node in ray.nodes()))\n"
    )
    (place.folder / "nodes.py").write_text(code)
    spec = place.spec(f"exec {sys.executable} {place.folder / 'nodes.py'}")

    async def life() -> None:
        backend = place.make()
        placement = Placement(head=head)  # type: ignore[arg-type]
        assert backend.refusal(ONE, placement) is None
        await backend.provision(spec, ONE, placement)
        folder = backend.attempt_dir(spec.submission_id)
        assert folder is not None
        await until((folder / "end.json").exists, 120)
        assert (folder / "driver.log").read_text().strip() == seen
        await backend.destroy(spec.submission_id)

    asyncio.run(life())
