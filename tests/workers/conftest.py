"""One local cluster of 2 nodes x 2 devices for all tests of this folder that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corral.workers.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.start(nodes=2, devices_per_node=2) as running:
        yield running
