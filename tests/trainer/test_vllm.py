"""Whole runs that generate with the real vllm, on the CPU: alone, in several ranks, and one replica in two of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from corral.workers.local_cluster import LocalCluster
from tests.trainer.runs import Inputs, error_line, metrics, samples, train

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

STEPS = 2
LR = "1e-3"
TWO = ["trainer.n_gpus_per_node=2"]
TP = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


def overrides(inputs: Inputs, run_dir: Path, *more: str) -> list[str]:
    return inputs.overrides(
        run_dir,
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        f"trainer.total_training_steps={STEPS}",
        "reward.num_workers=1",
        *more,
    )


@pytest.fixture(autouse=True)
def _shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    """Of vllm's ranks, by its names for them."""
    return {path.name for path in Path("/dev/shm").glob("*-cpushm_*")}


@pytest.fixture(scope="module")
def alone(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    done = train(overrides(inputs, run_dir))
    assert done.returncode == 0, done.stderr
    return run_dir


def assert_follows(run_dir: Path, alone: Path) -> None:
    """The engine had the trainer's weights at every step, and the first step's samples are those of one process."""
    recorded = metrics(run_dir)
    assert len(recorded) == STEPS
    for step in recorded:
        assert step["rollout/probe_gap"] < 1e-5
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 1e-2
    for name in ("row", "response_ids", "score"):
        assert [row[name] for row in samples(run_dir, 1)] == [row[name] for row in samples(alone, 1)]
    assert json.loads((run_dir / "plan.json").read_text())["rollout"]["name"] == "vllm"


def test_alone_in_one_process(alone: Path) -> None:
    assert_follows(alone, alone)
    assert len({tuple(row["response_ids"]) for step in (1, STEPS) for row in samples(alone, step)}) > STEPS * 6
    keys = json.loads((alone / "keys.json").read_text())
    for name in ("name", "load_format", "max_num_batched_tokens", "enable_prefix_caching"):
        assert keys[f"actor_rollout_ref.rollout.{name}"]["class"] == "used", name


@pytest.mark.parametrize(
    "more",
    [pytest.param([*TWO, *TP], id="one replica"), pytest.param(TWO, id="two replicas", marks=pytest.mark.slow)],
)
def test_in_two_ranks(inputs: Inputs, alone: Path, tmp_path: Path, more: list[str]) -> None:
    done = train(overrides(inputs, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    assert_follows(tmp_path / "run", alone)


@pytest.mark.slow
def test_on_two_nodes_with_a_replica_each(inputs: Inputs, alone: Path, tmp_path: Path) -> None:
    with LocalCluster.start(nodes=2, devices_per_node=2, resource="CPU") as cluster:
        done = train(
            overrides(inputs, tmp_path / "run", "trainer.nnodes=2", *TWO, *TP), {"RAY_ADDRESS": cluster.address}
        )
    assert done.returncode == 0, done.stderr
    assert_follows(tmp_path / "run", alone)


LITTLE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1024"


@pytest.mark.parametrize("more", [[], [*TWO, *TP]], ids=["alone", "two ranks"])
def test_an_engine_that_does_not_start_is_one_line(inputs: Inputs, tmp_path: Path, more: list[str]) -> None:
    done = train(overrides(inputs, tmp_path / "run", LITTLE, *more))
    assert done.returncode == 78, done.stderr
    assert "vllm does not start: " in error_line(done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
