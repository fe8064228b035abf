"""The parity check can fail: each planted bug in a copy of the package shows in what eight ranks record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import corral
from tests.trainer.parity import differences, parity_overrides
from tests.trainer.runs import Inputs, train

BUGS = {
    "sequence-parallel factor missing": ("engine/engine.py", "* self.parallel.world", "* self.plan.dp"),
    "denominator of one rank's share": (
        "engine/losses.py",
        "_weights(self.update, mode, batch, self.denominators,",
        "_weights(self.update, mode, batch, Denominators.of(batch),",
    ),
    "another random stream on one rank": (
        "workers/worker.py",
        "self.rollout.generate(requests, sampling, step=step)",
        "self.rollout.generate(requests, sampling, step=step + (self.rank.rank == 5))",
    ),
}


@pytest.fixture(scope="module")
def alone(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "one"
    done = train(parity_overrides(inputs, run_dir, split=False, dtype="float64"))
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, inputs: Inputs, alone: Path, tmp_path: Path):
    copy = tmp_path / "source" / "corral"
    shutil.copytree(Path(corral.__file__).parent, copy)
    file, right, wrong = BUGS[bug]
    source = (copy / file).read_text()
    assert right in source
    (copy / file).write_text(source.replace(right, wrong))
    run_dir = tmp_path / "many"
    done = train(parity_overrides(inputs, run_dir, split=True, dtype="float64"), cwd=copy.parent)
    assert done.returncode == 0, done.stderr
    assert differences(alone, run_dir, rtol=1e-9, atol=1e-9) != []
