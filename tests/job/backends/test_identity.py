"""Two services on one cluster whose data folders have the same path, each in its own pod; and the id of a service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.backends.base import Backend, Presence
from corral.job.backends.identity import NAME, service_id
from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.protocol.agent import AgentSpec
from corral.job.protocol.frames import data_frames
from corral.job.service.settings import RayCluster, Settings
from tests.job.backends.contract import JOB, ONE, Place, until_presence
from tests.job.backends.kuberay.place import kubernetes
from tests.job.backends.ray_jobs.dashboard import Dashboard

SHARED, OTHERS = f"{JOB}-a1", "rj-0123456789ac-a1"


@contextmanager
def pod(data_dir: Path, of: str) -> Iterator[None]:
    """The folder of service `of` lies at the path that all of them have."""
    away = data_dir.with_name(of)
    if away.exists():
        away.rename(data_dir)
    try:
        yield
    finally:
        data_dir.rename(away)


async def neither_touches_the_others(
    data_dir: Path,
    make: Callable[[], Backend],
    close: Callable[[Backend], Awaitable[None]],
    spec: Callable[[str], AgentSpec],
    said: Callable[[], None],
) -> None:
    """said: the job that both were sent prints something, which is not for the second to read."""
    with pod(data_dir, "first"):
        backend = make()
        await backend.provision(spec(JOB), ONE)
        await until_presence(backend, SHARED, Presence.ACTIVE)
        await close(backend)
    said()
    with pod(data_dir, "second"):
        backend = make()
        assert await backend.list_owned() == []
        assert (await backend.observe(SHARED)).presence is Presence.ABSENT
        with pytest.raises(ConfigError, match=r"another service that uses the .* was sent the same job"):
            await backend.provision(spec(JOB), ONE)
        assert await backend.fetch(SHARED, {}) is None
        assert await backend.end_record(SHARED) is None
        folder = backend.attempt_dir(SHARED)
        assert folder is not None
        assert not (folder / "driver.log").exists()
        await backend.stop(SHARED, 0.1)
        await backend.destroy(SHARED)
        await backend.provision(spec(OTHERS.removesuffix("-a1")), ONE)
        await until_presence(backend, OTHERS, Presence.ACTIVE)
        assert await backend.list_owned() == [OTHERS]
        await close(backend)
    with pod(data_dir, "first"):
        backend = make()
        assert await backend.list_owned() == [SHARED]
        assert (await backend.observe(SHARED)).presence is Presence.ACTIVE
        await backend.destroy(OTHERS)
        await backend.destroy(SHARED)
        await close(backend)
    with pod(data_dir, "second"):
        backend = make()
        assert await backend.list_owned() == [OTHERS]
        assert (await backend.observe(OTHERS)).presence is Presence.ACTIVE
        await backend.destroy(OTHERS)
        await close(backend)


def test_two_services_in_one_namespace(tmp_path):
    with kubernetes(tmp_path) as it:

        async def close(backend: Backend) -> None:
            it.backends.remove(backend)
            await backend.close()

        def spec(job_id: str) -> AgentSpec:
            return it.place.spec("echo mine; while :; do sleep 0.05; done", job_id)

        it.run(lambda: neither_touches_the_others(it.settings.data_dir, it.make, close, spec, lambda: None))
        it.nothing_left()


def test_two_services_on_one_ray_cluster(tmp_path):
    place = Place(lambda: None, "http://127.0.0.1:1", tmp_path)

    async def nothing(backend: Backend) -> None:
        pass

    async def main() -> None:
        async with Dashboard() as dashboard:
            settings = Settings(tmp_path / "data", backend="ray", ray=RayCluster(address=dashboard.address))

            def said() -> None:
                dashboard.jobs[SHARED].log += "".join(f"{line}\n" for line in data_frames("driver", 0, b"mine\n"))

            await neither_touches_the_others(
                settings.data_dir,
                lambda: RayJobsBackend(settings),
                nothing,
                lambda job_id: place.spec("x", job_id),
                said,
            )
            assert dashboard.jobs == {}

    asyncio.run(main())


def test_an_id_is_drawn_once_and_stays_with_its_folder(tmp_path):
    first, moved = tmp_path / "pods" / "data", tmp_path / "data"
    found = service_id(first)
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert service_id(first) == found
    assert (first / NAME).stat().st_mode & 0o777 == 0o600
    assert first.stat().st_mode & 0o777 == 0o700
    first.rename(moved)
    assert service_id(moved) == found
    assert service_id(first) != found
    assert [path.name for path in moved.iterdir()] == [NAME]


def test_all_who_draw_at_once_have_the_same(tmp_path):
    draw = (
        "import sys; from pathlib import Path; from corral.job.backends.identity import service_id; "
        "print('ready', flush=True); sys.stdin.read(1); print(service_id(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", draw, str(tmp_path / "data")]
    drawing = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(4)]
    for process in drawing:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in drawing:
        assert process.stdin is not None
        process.stdin.close()
    drawn = {process.stdout.read() for process in drawing if process.stdout is not None}
    assert [process.wait(10) for process in drawing] == [0] * 4
    assert drawn == {f"{service_id(tmp_path / 'data')}\n"}


@pytest.mark.parametrize("content", ["", "0123456789ab", "not an id\n", "0123456789ab\n0123456789ab\n", "\xff\n"])
def test_a_file_that_holds_no_id_is_said(tmp_path, content):
    (tmp_path / NAME).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"service\.id does not hold a service's id; restore it from a backup"):
        service_id(tmp_path)


def test_a_folder_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(InfraError, match=r"data/service\.id"):
        service_id(tmp_path / "data")
