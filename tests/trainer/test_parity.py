"""The split never changes the result: one process against eight ranks on two local Ray nodes, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.e2e.case import Parity
from corral.e2e.parity import PHASES, compare
from corral.workers.local_cluster import LocalCluster
from tests.trainer.parity import STEPS, other_exports, parity_overrides
from tests.trainer.runs import Inputs, metrics, samples, train


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalCluster.start(nodes=2, devices_per_node=4, resource="CPU") as cluster:
        yield cluster.address


PHASES_TOO = "trainer.record_phases=full"


def test_float64_runs_agree_in_every_phase(inputs: Inputs, tmp_path: Path, address: str):
    one, many = tmp_path / "one", tmp_path / "many"
    alone = train([*parity_overrides(inputs, one, split=False, dtype="float64"), PHASES_TOO])
    assert alone.returncode == 0, alone.stderr
    split = train([*parity_overrides(inputs, many, split=True, dtype="float64"), PHASES_TOO], {"RAY_ADDRESS": address})
    assert split.returncode == 0, split.stderr
    assert_equal(one, many, Parity(args=[], rtol=1e-9, atol=1e-9))
    assert_demanding(one)


def test_float32_runs_agree_on_replayed_samples(inputs: Inputs, tmp_path: Path, address: str):
    one, many = tmp_path / "one", tmp_path / "many"
    more = [
        PHASES_TOO,
        "skip.rollout.enable=True",
        f"skip.rollout.dump_dir={tmp_path}/dumps",
        f"skip.rollout.steps=[{','.join(map(str, range(1, STEPS + 1)))}]",
    ]
    alone = train(parity_overrides(inputs, one, split=False, dtype="float32") + more)
    assert alone.returncode == 0, alone.stderr
    split = train(parity_overrides(inputs, many, split=True, dtype="float32") + more, {"RAY_ADDRESS": address})
    assert split.returncode == 0, split.stderr
    assert [step["rollout/replayed"] for step in metrics(many)] == [1.0] * STEPS
    assert_equal(one, many, Parity(args=[], rtol=1e-4, atol=1e-6))


def assert_equal(one: Path, many: Path, parity: Parity) -> None:
    report = compare(one, many, parity, many / "divergence")
    assert report.first is None, report.hint
    assert report.compared.keys() == set(PHASES)
    assert {row.step for row in report.rows} == set(range(1, STEPS + 1))
    assert other_exports(one, many, rtol=parity.rtol, atol=parity.atol) == []


def assert_demanding(run_dir: Path) -> None:
    """The comparison means something: rewards vary at every step, lengths differ, gradients are not tiny."""
    for step in range(1, STEPS + 1):
        rows = samples(run_dir, step)
        assert len({row["score"] for row in rows}) >= 8
        assert len({len(row["response_ids"]) for row in rows}) >= 8
    for step in metrics(run_dir):
        assert step["actor/grad_norm"] > 1e-2
        assert step["critic/grad_norm"] > 1e-2
