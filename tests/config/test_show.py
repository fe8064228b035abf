"""The plan as a person and as a program reads it."""

from __future__ import annotations

import json

from corral.config.show import as_json, render
from tests.config.conftest import install

ACTOR = "actor_rollout_ref.actor"


def test_text_holds_the_numbers_of_the_plan(plan_of):
    text = render(
        plan_of(
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=4",
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.enforce_eager=True",
        )
    )
    for part in (
        "8 = 2 nodes × 4 logical devices, cpu",
        "16 samples = 16 prompts × 1",
        "2 optimizer steps of 8 prompts",
        "SP 2, DP 4; micro-batch: train 32768 tokens",
        "SP 1, DP 8; micro-batch: train 32768 tokens",
        "native, 8 replicas",
        "the native engine generates instead",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.enforce_eager=True",
    ):
        assert part in text
    assert max(text.splitlines().count(line) for line in text.splitlines()) == 1


def test_columns_line_up(plan_of):
    facts = render(plan_of()).splitlines()[1:]
    starts = {len(line) - len(line[2:].lstrip()) for line in facts}
    columns = {len(line[: len(line) - len(line[line.index("  ", 2) :].lstrip())]) for line in facts}
    assert starts == {2}
    assert len(columns) == 1


def test_static_batches_greedy_and_reward_are_said(plan_of, files):
    text = render(
        plan_of(
            f"{ACTOR}.use_dynamic_bsz=False",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "critic.ppo_micro_batch_size_per_gpu=1",
            "trainer.test_freq=2",
            f"data.val_files={files}/test.parquet",
            "+reward.custom_reward_function.path=my.rewards",
            "algorithm.use_kl_in_reward=True",
        )
    )
    for part in (
        "train 2 samples, infer 4 samples",
        "train 1 sample, infer 1 sample",
        "before training and every 2 steps, greedy",
        "compute_score of my.rewards",
        "0.001 × KL in the reward",
        "ref ",
    ):
        assert part in text


def test_json_is_the_plan(plan_of):
    plan = plan_of("trainer.nnodes=2")
    read = json.loads(as_json(plan))
    assert read == json.loads(json.dumps(plan.as_dict()))
    assert (read["topology"]["world"], read["samples_per_step"]) == (2, 16)


def test_phase_records_are_said_when_there_are_any(plan_of):
    assert "phase records" not in render(plan_of())
    assert any(
        line.split() == ["phase", "records", "full"]
        for line in render(plan_of("trainer.record_phases=full")).splitlines()
    )


def test_the_options_of_vllm_are_said(plan_of, monkeypatch):
    install(monkeypatch, "vllm")
    vllm = "actor_rollout_ref.rollout"
    on_cpu = render(plan_of(f"{vllm}.name=vllm", f"+{vllm}.engine_kwargs.vllm.swap_space=4"))
    for part in (
        "vllm, 1 replica, up to 256 sequences each, seed 42, temperature 1\n",
        "  vllm  ",
        "float32; sequences up to 1025 tokens; eager; 1.0 GiB a rank for keys and values; engine_kwargs: swap_space\n",
    ):
        assert part in on_cpu
    on_cuda = render(
        plan_of(
            "trainer.device=cuda",
            "trainer.n_gpus_per_node=4",
            f"{vllm}.tensor_model_parallel_size=2",
            f"{vllm}.max_model_len=2000",
        )
    )
    for part in (
        "vllm, 2 replicas of 2 ranks, up to 256 sequences each",
        "bfloat16; sequences up to 2000 tokens; device graphs; 50% of the device's memory; gives memory back while "
        "training\n",
    ):
        assert part in on_cuda
    awake = render(plan_of("trainer.device=cuda", f"{vllm}.free_cache_engine=False", f"{vllm}.enforce_eager=True"))
    assert "eager; 50% of the device's memory\n" in awake


def test_a_plan_for_devices_that_are_elsewhere_says_what_they_need(plan_of):
    text = render(plan_of("trainer.device=npu", "actor_rollout_ref.rollout.name=vllm"))
    assert "bfloat16; sequences up to 1025 tokens" in text
    assert "name=vllm: vllm and vllm_ascend are not installed here; every node of the run needs it" in text
    assert "npu: this path has been tested without a device only" in text
