from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.small import ARCHITECTURES, write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small causal language models, by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {architecture: write_model(folder, architecture) for architecture in ARCHITECTURES}
