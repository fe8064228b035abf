"""docs/metrics.md and what a run records name the same metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.runs import Inputs, metrics, train_here

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def documented() -> Iterator[str]:
    """Regular expressions of the names in the first column of the page's tables, one per metric."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            before, choices, after = re.fullmatch(r"([^{]*)(?:\{(.+)\})?(.*)", name).groups()
            for choice in (choices or "").split(","):
                pattern = re.escape(before + choice + after)
                yield pattern.replace("SOURCE", ".+").replace("mean@N", r"mean@\d+")


@pytest.fixture(scope="module")
def recorded(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of a step in which every phase runs: the first one after a stop."""
    run_dir = tmp_path_factory.mktemp("documented") / "run"
    overrides = inputs.overrides(
        run_dir,
        f"data.val_files={inputs.data}/test.parquet",
        "data.val_max_samples=2",
        "trainer.test_freq=1",
        "trainer.val_before_train=False",
        "trainer.save_freq=1",
        "trainer.record_phases=summary",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.calculate_entropy=True",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
    )
    for steps in (1, 2):
        assert train_here([*overrides, f"trainer.total_training_steps={steps}"]) == 0
    (line,) = metrics(run_dir)
    return set(line) - {"step"}


def test_every_recorded_metric_is_documented(recorded):
    patterns = list(documented())
    assert {name for name in recorded if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


def test_every_documented_metric_is_recorded(recorded):
    assert [pattern for pattern in documented() if not any(re.fullmatch(pattern, name) for name in recorded)] == []


def test_no_metric_is_documented_twice():
    names = list(documented())
    assert len(names) > 60
    assert sorted(set(names)) == sorted(names)
