"""A real run whose samples vllm generates, where it is installed: what became of its keys, and what was read."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from corral.config.audit import NOT_NEEDED, UNREAD, USED
from corral.config.plan import Plan
from corral.config.reads import leaf_fields, reads
from corral.config.reasons import VLLM_ONLY
from corral.config.resolve import resolve
from corral.data.arithmetic import write_arithmetic
from corral.engine.tiny import write_tiny_model
from tests.trainer.runs import REWARDS, train_here

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

ROLLOUT = "actor_rollout_ref.rollout"
WITHOUT_EFFECT = {
    f"{ROLLOUT}.{name}"
    for name in ("gpu_memory_utilization", "free_cache_engine", "enforce_eager", "enable_chunked_prefill")
}
"""Of vllm's keys, on cpu."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, dict[str, Any]], dict[str, set[str]]]:
    """The plan, its keys.json, and the fields that were read."""
    folder = tmp_path_factory.mktemp("audit")
    write_tiny_model(folder / "model", mean_length=8)
    write_arithmetic(folder / "data", seed=0, train=16, test=2)
    overrides = [
        f"data.train_files={folder}/data/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=256",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.max_num_seqs=8",
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=33554432",
        f"reward.custom_reward_function.path={REWARDS}/varied_reward.py",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={folder}/run",
    ]
    assert train_here(overrides) == 0
    return resolve(overrides).plan, json.loads((folder / "run" / "keys.json").read_text()), reads()


def test_every_option_of_the_plan_is_handed_to_vllm(done):
    plan, _, read = done
    assert plan.rollout.vllm is not None
    options = {field for field in leaf_fields(plan) if field.startswith("rollout.vllm.")}
    assert options
    assert {field: read.get(field) for field in options} == {field: {"corral.rollout.vllm"} for field in options}


def test_every_key_of_vllm_is_used_or_has_a_reason(done):
    _, keys, _ = done
    kinds = {key: keys[key]["class"] for key in (*VLLM_ONLY, f"{ROLLOUT}.enforce_eager")}
    assert kinds == {key: NOT_NEEDED if key in WITHOUT_EFFECT else USED for key in kinds}
    assert all("corral.rollout.vllm" in keys[key]["by"] for key in set(kinds) - WITHOUT_EFFECT)
    assert {key: use["reason"] for key, use in keys.items() if use.get("reason", "").startswith(UNREAD)} == {}


def test_the_degree_is_no_longer_a_key_with_one_value(done):
    _, keys, _ = done
    assert keys[f"{ROLLOUT}.tensor_model_parallel_size"]["class"] == USED
