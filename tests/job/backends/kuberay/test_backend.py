"""The KubeRay backend: the contract of all backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.backends.contract import BackendContract, Place
from tests.job.backends.kuberay.place import kubernetes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with kubernetes(tmp_path) as it:
        yield it.place


class TestKubeRayBackend(BackendContract):
    pass
