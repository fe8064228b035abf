"""The arithmetic of a plan against the definitions, and where a run goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.config.plan import MicroBatches
from corral.config.resolve import resolve
from corral.errors import ConfigError

ARR = "actor_rollout_ref"
ACTOR = f"{ARR}.actor"
ROLLOUT = f"{ARR}.rollout"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nodes=st.sampled_from([1, 2, 4]),
    devices=st.sampled_from([1, 2, 8]),
    sp=st.sampled_from([1, 2, 4]),
    mini=st.integers(1, 9),
    minis=st.integers(1, 5),
    epochs=st.integers(1, 3),
    n=st.integers(1, 4),
    budget=st.integers(100, 9999),
)
def test_degrees_steps_and_budgets(plan_of, nodes, devices, sp, mini, minis, epochs, n, budget):
    keys = (
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={devices}",
        f"{ACTOR}.ulysses_sequence_parallel_size={sp}",
        f"{ACTOR}.ppo_mini_batch_size={mini}",
        f"{ACTOR}.ppo_epochs={epochs}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={budget}",
        f"{ROLLOUT}.n={n}",
        f"data.train_batch_size={mini * minis}",
    )
    world = nodes * devices
    if world % sp:
        with pytest.raises(ConfigError, match=f"does not divide the world of {world} ranks"):
            plan_of(*keys)
        return
    plan = plan_of(*keys)
    assert plan.actor.dp * plan.actor.sp == plan.topology.world == plan.rollout.replicas == world
    assert plan.critic.dp == world  # the critic's SP degree is its own
    assert plan.samples_per_step == mini * minis * n
    assert plan.actor_update.optimizer_steps == plan.critic_update.optimizer_steps == minis * epochs
    assert plan.actor.train == plan.actor.infer == MicroBatches(budget * sp, None)
    assert plan.critic.train == MicroBatches(32768, None)


def test_critic_inherits_from_the_actor_and_can_differ(plan_of):
    inherited = plan_of(f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.loss_agg_mode=token-sum", f"{ACTOR}.shuffle=True")
    assert inherited.critic_update.epochs == 2
    assert inherited.critic_update.loss_agg_mode == "token-sum"
    assert inherited.critic_update.shuffle
    own = plan_of("critic.ppo_mini_batch_size=4", "critic.ppo_epochs=3", "critic.ppo_max_token_len_per_gpu=1000")
    assert (own.critic_update.mini_batch_prompts, own.critic_update.optimizer_steps) == (4, 12)
    assert own.critic.train == MicroBatches(1000, None)
    assert own.critic.infer == MicroBatches(32768, None)
    assert own.actor_update.optimizer_steps == 2


def test_static_batches_and_a_log_prob_flag_of_its_own(plan_of):
    plan = plan_of(
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
        "critic.ppo_micro_batch_size_per_gpu=3",
    )
    assert plan.actor.train == MicroBatches(None, 2)
    assert plan.actor.infer == MicroBatches(16384, None)
    assert plan.critic.train == plan.critic.infer == MicroBatches(None, 3)


@pytest.mark.parametrize(
    ("missing", "given"),
    [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"]),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"]),
        (
            "critic.ppo_micro_batch_size_per_gpu",
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"],
        ),
    ],
)
def test_without_dynamic_batches_a_micro_batch_size_is_needed(plan_of, missing, given):
    with pytest.raises(ConfigError, match=f"needs {missing}"):
        plan_of(f"{ACTOR}.use_dynamic_bsz=False", *given)


def test_reference_model_is_built_for_either_kl_and_follows_the_actor(plan_of):
    assert plan_of().ref is None
    two = ("trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    for kl in (f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"):
        ref = plan_of(*two, kl).ref
        assert ref is not None
        assert (ref.sp, ref.dp, ref.train, ref.optim) == (2, 1, None, None)
        assert ref.infer == MicroBatches(32768, None)
    own = plan_of(*two, f"{ACTOR}.use_kl_loss=True", f"{ARR}.ref.ulysses_sequence_parallel_size=1").ref
    assert own is not None
    assert (own.sp, own.dp) == (1, 2)


def test_launchers(plan_of):
    def where(*keys: str, **environ: str) -> tuple[str, str | None]:
        top = plan_of(*keys, **environ).topology
        return top.launcher, top.ray_address

    assert where() == ("in_process", None)
    assert where(RAY_ADDRESS="") == ("in_process", None)
    assert where(RAY_ADDRESS="10.0.0.1:6379") == ("ray", "10.0.0.1:6379")
    assert where("trainer.nnodes=2") == ("ray", None)
    assert where("trainer.nnodes=2", RAY_ADDRESS="auto") == ("ray", "auto")
    assert where("trainer.device=cuda", "trainer.n_gpus_per_node=8") == ("ray", None)
    assert where("trainer.device=npu", "trainer.nnodes=2", RAY_ADDRESS="h:1") == ("ray", "h:1")


def test_local_nodes_are_announced(plan_of):
    assert not any("RAY_ADDRESS" in notice for notice in plan_of().notices)
    (notice,) = (n for n in plan_of("trainer.nnodes=3", "trainer.n_gpus_per_node=2").notices if "RAY_ADDRESS" in n)
    assert "3 local Ray nodes with 2 logical devices each" in notice


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_several_accelerator_nodes_need_a_cluster(plan_of, device):
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2.*ray start.*RAY_ADDRESS"):
        plan_of(f"trainer.device={device}", "trainer.nnodes=2")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16"), ("npu", "bfloat16")])
def test_dtype_follows_the_platform(plan_of, device, dtype):
    plan = plan_of(f"trainer.device={device}")
    assert (plan.actor.compute_dtype, plan.critic.compute_dtype) == (dtype, dtype)
    assert plan.actor.master_dtype == "float32"


@pytest.mark.parametrize(
    ("written", "meant"), [("fp64", "float64"), ("float64", "float64"), ("fp32", "float32"), ("bf16", "bfloat16")]
)
def test_dtype_spellings(plan_of, written, meant):
    plan = plan_of(f"{ACTOR}.fsdp_config.dtype={written}", f"{ACTOR}.fsdp_config.model_dtype={written}")
    assert (plan.actor.compute_dtype, plan.actor.master_dtype) == (meant, meant)


def test_the_probe_is_stricter_in_higher_precision(plan_of):
    by_dtype = [plan_of(f"{ACTOR}.fsdp_config.dtype={d}").rollout.probe_tolerance for d in ("fp64", "fp32", "bf16")]
    assert by_dtype == sorted(by_dtype)
    assert by_dtype[0] < by_dtype[1] < by_dtype[2]
    assert plan_of(f"{ROLLOUT}.probe_tolerance=0.5").rollout.probe_tolerance == 0.5


def test_run_folder(plan_of, tmp_path):
    named = plan_of("trainer.project_name=p", "trainer.experiment_name=e").trainer
    assert named.run_dir == named.checkpoint_dir == os.path.abspath("checkpoints/p/e")
    given = plan_of(f"trainer.default_local_dir={tmp_path}/here").trainer
    assert given.run_dir == given.checkpoint_dir == f"{tmp_path}/here"
    moved = plan_of(f"trainer.default_local_dir={tmp_path}/here", CORRAL_RUN_DIR=f"{tmp_path}/records").trainer
    assert (moved.run_dir, moved.checkpoint_dir) == (f"{tmp_path}/records", f"{tmp_path}/here")


def test_home_is_expanded_everywhere(base, files, monkeypatch):
    monkeypatch.setenv("HOME", str(files))
    home = ['data.train_files="~/train.parquet"', f'{ARR}.model.path="~/model"', 'skip.rollout.dump_dir="~/d"']
    plan = resolve([*base, *home], {}).plan
    assert plan.data.train_files == (f"{files}/train.parquet",)
    assert plan.actor.model.path == plan.critic.model.path == f"{files}/model"
    assert plan.skip.dump_dir.startswith(f"{files}/d/")


def test_validation_runs_before_training_exactly_when_it_runs_at_all(plan_of, files):
    val = f"data.val_files={files}/test.parquet"
    assert plan_of().trainer.val_before_train is False
    assert plan_of(val, "trainer.test_freq=5").trainer.val_before_train is True
    assert plan_of(val, "trainer.test_freq=5", "trainer.val_before_train=False").trainer.val_before_train is False
    assert plan_of(val, "trainer.val_before_train=True").trainer.val_before_train is True


def test_loss_scale_defaults_to_the_response_cap(plan_of):
    mode = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    assert plan_of().actor_update.loss_scale_factor is None
    assert plan_of(mode, "data.max_response_length=77").actor_update.loss_scale_factor == 77.0
    own = plan_of(mode, f"{ACTOR}.loss_scale_factor=10")
    assert own.actor_update.loss_scale_factor == own.critic_update.loss_scale_factor == 10.0


def test_a_sequence_longer_than_the_budget_is_a_notice(plan_of):
    plan = plan_of(
        "data.max_prompt_length=600", "data.max_response_length=600", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"
    )
    (notice,) = plan.notices
    assert "1200 tokens" in notice
    assert "budget of 1000" in notice


def test_lists_of_files(plan_of, files):
    plan = plan_of(f"data.train_files=[{files}/train.parquet, {files}/test.parquet]")
    assert plan.data.train_files == (f"{files}/train.parquet", f"{files}/test.parquet")


def test_a_reward_function_is_a_file_or_a_module(plan_of, tmp_path):
    key = "reward.custom_reward_function.path"
    (tmp_path / "digits.py").write_text("")
    assert plan_of(f"{key}={tmp_path}/digits.py").reward.custom_path == f"{tmp_path}/digits.py"
    assert plan_of(f"{key}=my.rewards").reward.custom_path == "my.rewards"
    with pytest.raises(ConfigError, match="neither a file"):
        plan_of(f"{key}={tmp_path}/absent.py")


def test_auto_is_what_the_device_files_say(base):
    automatic = [argument for argument in base if not argument.startswith("trainer.device")]
    device = resolve(automatic, {}).plan.topology.device
    if not list(Path("/dev").glob("nvidia[0-9]*")) and not list(Path("/dev").glob("davinci[0-9]*")):
        assert device == "cpu"
    else:
        assert device in ("cuda", "npu")
