"""One tiny model and one small data set for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.data.arithmetic import write_arithmetic
from corral.engine.tiny import write_tiny_model
from tests.trainer.runs import Inputs, assert_whole, error_line, train_here


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", mean_length=12)
    write_arithmetic(folder / "data", seed=0, train=64, test=8)
    return Inputs(model=folder / "model", data=folder / "data")


@pytest.fixture
def refused(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs one step with `more` in this process, and returns the one line that refuses it."""

    def run(exit_code: int, *more: str, started: bool = False) -> str:
        """started: the run folder exists already when the mistake is found."""
        assert train_here(inputs.overrides(tmp_path / "run", "reward.num_workers=1", *more)) == exit_code
        line = error_line(capsys.readouterr().err)
        assert (tmp_path / "run").exists() == started
        if started:
            assert_whole(tmp_path / "run")
        return line

    return run
