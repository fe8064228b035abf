"""What `/readyz` says of a service that cannot do its work: which part it is, and why."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from corral.errors import ConfigError, InfraError
from corral.job.backends.ray_jobs.backend import RayJobsBackend
from corral.job.service import readiness
from corral.job.service.settings import RayCluster, Settings
from tests.job.service.running import Running, running


@pytest.fixture
def service(tmp_path):
    with running(tmp_path / "data") as it:
        yield it


def said(service: Running) -> str:
    answer = service.http.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    return answer.json()["error"]


def test_a_service_that_can_work_says_so_and_leaves_nothing(service, tmp_path):
    before = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert service.http.get("/readyz").json() == {"status": "ready"}
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == before


def test_a_data_folder_that_is_gone(service, tmp_path):
    (tmp_path / "data").rename(tmp_path / "gone")
    assert f"disk: cannot write to data folder {tmp_path / 'data'}: No such file or directory" in said(service)
    (tmp_path / "gone").rename(tmp_path / "data")
    assert service.http.get("/readyz").status_code == 200


def test_a_database_that_is_broken(service, tmp_path):
    with sqlite3.connect(tmp_path / "data" / "corral.db") as other:
        other.execute("ALTER TABLE jobs RENAME TO elsewhere")
    line = said(service)
    assert line.startswith("not ready: database")
    assert "no such table: jobs" in line
    assert "disk" not in line
    assert "backend" not in line


def test_a_backend_that_does_not_answer(service, monkeypatch):
    async def hangs() -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(readiness, "SECONDS", 0.2)
    monkeypatch.setattr(service.runner.backend, "list_owned", hangs)
    assert said(service) == "not ready: backend still: no answer within 0.2 s"


@pytest.mark.parametrize("kind", [InfraError, ConfigError])
def test_each_part_that_does_not_work_is_named(service, monkeypatch, tmp_path, kind):
    async def fails() -> list[str]:
        raise kind("pods is forbidden")

    monkeypatch.setattr(service.runner.backend, "list_owned", fails)
    (tmp_path / "data").rename(tmp_path / "gone")
    assert said(service).endswith("data: No such file or directory; backend still: pods is forbidden")


def test_no_password_of_an_address_is_told(service, monkeypatch, tmp_path):
    cluster = RayCluster(address="http://ann:hunter2@127.0.0.1:1")
    monkeypatch.setattr(service.runner, "backend", RayJobsBackend(Settings(tmp_path / "other", ray=cluster)))
    line = said(service)
    assert line.startswith("not ready: backend ray: Ray's dashboard at http://***@127.0.0.1:1 does not answer: ")
    assert "hunter2" not in line
