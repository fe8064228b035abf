"""Stores over SQLite and over a real PostgreSQL server, and what is put into them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.job.core.clock import Clock
from corral.job.store.store import Store
from tests.job.store import postgres

Open = Callable[..., Store]


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    folder = postgres.binaries()
    if folder is None:
        pytest.skip("no PostgreSQL here (initdb, postgres): the store is not tested on it; `.ci/run` installs it")
    with postgres.running(folder) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str | None:
    """An empty database, for the `url` of a Store."""
    if request.param == "sqlite":
        return None
    found: str = request.getfixturevalue("server").new_database()
    return found


@pytest.fixture
def data_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="store-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def reopen(url: str | None, data_dir: Path) -> Iterator[Open]:
    """Opens the store, closing it first if it is open. Takes options of Store."""
    opened: list[Store] = []

    def open_it(**options: object) -> Store:
        while opened:
            opened.pop().close()
        opened.append(Store(url, data_dir, Clock(), **options))
        return opened[-1]

    yield open_it
    while opened:
        opened.pop().close()


@pytest.fixture
def store(reopen: Open) -> Store:
    return reopen()
