"""One tiny model and one small data set for all tests of the trainer."""

from __future__ import annotations

import pytest

from corral.data.arithmetic import write_arithmetic
from corral.engine.tiny import write_tiny_model
from tests.trainer.runs import Inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", mean_length=12)
    write_arithmetic(folder / "data", seed=0, train=64, test=8)
    return Inputs(model=folder / "model", data=folder / "data")
