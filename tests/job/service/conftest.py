from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.job.service.running import Running, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without tokens, shared by the tests of a file."""
    with running(tmp_path_factory.mktemp("service") / "data") as it:
        yield it
