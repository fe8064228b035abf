"""The reference command, to the letter: what the shell delivers, and the plan it gives on 2 nodes × 4 devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from corral.config.plan import MicroBatches
from corral.config.resolve import Resolved, resolve

SCRIPT = Path(__file__).parents[2] / "examples" / "run_qwen3_06b_ppo_multinode.sh"


def shell_arguments(files: Path, *extra: str, **environ: str) -> list[str]:
    """The arguments that bash hands to python3 when it runs the example script."""
    stubs = files / "stubs"
    stubs.mkdir(exist_ok=True)
    stub = stubs / "python3"
    stub.write_text(f"#!{sys.executable}\nimport os, sys\nos.write(1, '\\0'.join(sys.argv[3:]).encode())\n")
    stub.chmod(0o755)
    settings = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "HOME": str(files),
        "MODEL_PATH": f"{files}/model",
        "DATA_DIR": str(files),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), *extra], env={**settings, **environ}, capture_output=True, timeout=30, check=True
    )
    return done.stdout.decode().split("\0")


@pytest.fixture
def reference(files: Path) -> Resolved:
    arguments = shell_arguments(
        files,
        "trainer.device=cpu",
        SKIP_ENABLE="True",
        SKIP_DUMP_DIR=f"{files}/dump",
        SKIP_STEPS="[1]",
        SKIP_ACTION="cache",
    )
    return resolve(arguments, {})


def test_world_degrees_and_steps(reference):
    plan = reference.plan
    assert (plan.topology.world, plan.topology.nnodes, plan.topology.devices_per_node) == (8, 2, 4)
    assert (plan.topology.device, plan.topology.launcher, plan.topology.ray_address) == ("cpu", "ray", None)
    assert (plan.actor.sp, plan.actor.dp) == (2, 4)
    assert plan.critic is not None
    assert (plan.critic.sp, plan.critic.dp) == (2, 4)
    assert plan.ref is None
    assert plan.samples_per_step == 16
    assert plan.actor_update.optimizer_steps == 2
    assert plan.critic_update is not None
    assert plan.critic_update.optimizer_steps == 2


def test_token_budgets_and_replicas(reference):
    plan = reference.plan
    assert plan.actor.train == plan.actor.infer == MicroBatches(32768, None)
    assert plan.critic.train == plan.critic.infer == MicroBatches(65536, None)
    assert (plan.rollout.name, plan.rollout.requested, plan.rollout.replicas) == ("native", "vllm", 8)


def test_every_value_of_the_command_arrives(reference, files):
    plan = reference.plan
    assert plan.data.train_files == (f"{files}/train.parquet",)
    assert plan.data.val_files == (f"{files}/test.parquet",)
    assert (plan.data.max_prompt_length, plan.data.max_response_length, plan.data.shuffle) == (512, 128, False)
    assert plan.actor.model.path == plan.critic.model.path == f"{files}/model"
    assert plan.actor.model.gradient_checkpointing
    assert plan.critic.model.gradient_checkpointing
    assert (plan.actor.optim.lr, plan.critic.optim.lr) == (1e-6, 1e-5)
    assert all((e.param_offload, e.optimizer_offload) == (True, True) for e in (plan.actor, plan.critic))
    assert plan.actor.use_torch_compile is False
    assert (plan.actor.compute_dtype, plan.actor.master_dtype) == ("float32", "float32")
    assert plan.trainer.logger == ("console",)
    assert (plan.trainer.total_training_steps, plan.trainer.total_epochs, plan.trainer.critic_warmup) == (1, 1, 0)
    assert (plan.trainer.save_freq, plan.trainer.test_freq, plan.trainer.val_before_train) == (-1, -1, False)
    assert plan.skip.enable
    assert (plan.skip.steps, plan.skip.action) == ((1,), "cache")
    name = "qwen3_06b_fsdp_multinode_2x4_verl_ppo_example_gsm8k_qwen3"
    assert plan.skip.dump_dir == f"{files}/dump/{name}/GBS16_N1_in512_out128"


def test_unused_keys_are_exactly_these_each_with_a_reason(reference):
    rollout = "actor_rollout_ref.rollout"
    unused = {item.key: item for item in reference.plan.unused}
    assert set(unused) == {
        "data.val_files",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        f"{rollout}.log_prob_micro_batch_size_per_gpu",
        f"{rollout}.gpu_memory_utilization",
        f"{rollout}.enable_chunked_prefill",
        f"{rollout}.enforce_eager",
        f"{rollout}.engine_kwargs.vllm.compilation_config.cudagraph_mode",
    }
    assert len(reference.plan.unused) == len(unused)
    assert all(item.reason for item in unused.values())
    assert unused[f"{rollout}.engine_kwargs.vllm.compilation_config.cudagraph_mode"].value == "FULL_AND_PIECEWISE"


def test_one_notice_each_for_vllm_local_nodes_offload_and_the_other_spelling(reference):
    words = ("vllm", "Ray", "offload", "use_torch_compile is read as")
    assert [len([n for n in reference.plan.notices if word in n]) for word in words] == [1, 1, 1, 1]
    assert len(reference.plan.notices) == 4


def test_the_configuration_is_plain_data_with_every_link_resolved(reference):
    text = yaml.safe_dump(reference.config)
    assert "${" not in text
    assert yaml.safe_load(text) == reference.config
    assert reference.config["critic"]["ppo_mini_batch_size"] == 8
    assert reference.config["actor_rollout_ref"]["ref"]["ulysses_sequence_parallel_size"] == 2


def test_arguments_appended_to_the_script_win(files):
    extra = ("trainer.device=cpu", "trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3")
    plan = resolve(shell_arguments(files, *extra), {}).plan
    assert plan.topology.world == 2
    assert plan.trainer.total_training_steps == 3


def test_skip_off_lists_its_keys_as_unused(files):
    plan = resolve(shell_arguments(files, "trainer.device=cpu"), {}).plan
    assert not plan.skip.enable
    off = {item.key for item in plan.unused if item.key.startswith("skip.")}
    assert off == {"skip.rollout.dump_dir", "skip.rollout.steps", "skip.rollout.action"}
