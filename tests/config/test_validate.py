"""Values and combinations that cannot run: one line each, with the key, the numbers and a fix."""

from __future__ import annotations

import pytest

from corral.errors import ConfigError
from tests.config.conftest import write_model

ARR = "actor_rollout_ref"
ACTOR = f"{ARR}.actor"
ROLLOUT = f"{ARR}.rollout"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.train_batch_size=20"], ["20", "ppo_mini_batch_size=8", "multiple", "16"]),
        (["critic.ppo_mini_batch_size=5"], ["critic.ppo_mini_batch_size=5", "16"]),
        (["data.train_batch_size=4"], ["data.train_batch_size=4", "ppo_mini_batch_size=8"]),
        (["trainer.nnodes=3", f"{ACTOR}.ulysses_sequence_parallel_size=2"], ["=2", "world of 3", "1, 3"]),
        (["critic.ulysses_sequence_parallel_size=2"], ["critic.ulysses_sequence_parallel_size=2", "world of 1"]),
        ([f"{ARR}.model.use_remove_padding=False"], ["use_remove_padding=False", "packed"]),
        (["critic.model.use_remove_padding=False"], ["critic.model.use_remove_padding=False", "packed"]),
        ([f"{ROLLOUT}.tensor_model_parallel_size=3", "trainer.nnodes=2"], ["=3", "needs the vllm engine"]),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.nnodes=2"], ["=2", "vllm"]),
        (["data.max_prompt_length=40000", "data.max_response_length=961"], ["40961", "40960", "positions"]),
        ([f"{ARR}.model.path=null"], [f"{ARR}.model.path is not set"]),
        (["critic.enable=False"], ["critic.enable=False", "gae"]),
        (["algorithm.adv_estimator=gea"], ["gea is unknown", "'gae'"]),
        ([f"{ACTOR}.policy_loss.loss_mode=vanila"], ["'vanilla'"]),
        ([f"{ACTOR}.loss_agg_mode=token_mean"], ["'token-mean'"]),
        ([f"{ACTOR}.kl_loss_type=low_var"], ["'low_var_kl'"]),
        (["algorithm.kl_penalty=full"], ["full is not available"]),
        (["algorithm.kl_ctrl.type=adaptiv"], ["'adaptive'"]),
        (["algorithm.kl_ctrl.horizon=0"], ["horizon=0", "at least 1"]),
        (["algorithm.kl_ctrl.target_kl=0"], ["target_kl=0", "above 0"]),
        ([f"{ACTOR}.optim.lr_scheduler_type=cosin"], ["'cosine'"]),
        ([f"{ACTOR}.strategy=megatron"], ["megatron is not available"]),
        ([f"{ROLLOUT}.name=vlm"], ["'vllm'"]),
        ([f"{ROLLOUT}.name=sglang"], ["sglang is not available"]),
        (["trainer.logger=[console,wandb]"], ["wandb is not available", "console, file"]),
        (["trainer.device=gpu"], ["gpu is unknown", "auto, cpu, cuda, npu"]),
        (["trainer.resume_mode=resume"], ["resume is unknown", "'resume_path'", "disable, auto"]),
        (["trainer.resume_mode=resume_path"], ["without trainer.resume_from_path", "global_step_N"]),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"], ["nowhere is not a folder"]),
        (["trainer.max_actor_ckpt_to_keep=0"], ["max_actor_ckpt_to_keep=0", "at least 1"]),
        (["data.truncation=middl"], ["'middle'"]),
        (["reward.reward_manager.name=dapo"], ["dapo is not available"]),
        (["skip.rollout.action=cach"], ["'cache'", "cache, repeat"]),
        (["skip.rollout.action=random"], ["random is not available"]),
        (
            ["skip.rollout.enable=True", "skip.rollout.steps=[1,5]", "trainer.total_training_steps=4"],
            ["[1, 5]", "step 4"],
        ),
        (["skip.rollout.steps=[0]"], ["[0]", "from 1"]),
        (["trainer.total_training_steps=0"], ["at least 1"]),
        ([f"{ROLLOUT}.n=0"], [f"{ROLLOUT}.n=0", "at least 1"]),
        ([f"{ROLLOUT}.val_kwargs.do_sample=True"], ["temperature=0", "above 0"]),
        ([f"{ROLLOUT}.val_kwargs.n=4"], ["n=4", "do_sample=True"]),
        ([f"{ROLLOUT}.temperature=0"], [f"{ROLLOUT}.temperature=0", "above 0"]),
        ([f"{ROLLOUT}.top_k=0"], ["top_k=0", "-1"]),
        ([f"{ROLLOUT}.top_p=1.5"], ["top_p=1.5"]),
        ([f"{ACTOR}.optim.lr=0"], ["lr=0", "above 0"]),
        ([f"{ACTOR}.optim.lr=nan"], ["lr=nan"]),
        (["critic.optim.lr=-1e-5"], ["critic.optim.lr=-1e-05"]),
        ([f"{ACTOR}.optim.betas=[0.9]"], ["betas", "[0.9,0.999]"]),
        ([f"{ACTOR}.clip_ratio_c=1"], ["clip_ratio_c=1", "above 1"]),
        (["algorithm.gamma=1.1"], ["algorithm.gamma=1.1", "between 0 and 1"]),
        ([f"{ACTOR}.entropy_coeff=inf"], ["entropy_coeff=inf"]),
        ([f"{ACTOR}.fsdp_config.fsdp_size=4"], ["fsdp_size=4", "-1"]),
        ([f"{ACTOR}.fsdp_config.dtype=fp16"], ["fp16", "bfloat16"]),
        (["critic.fsdp.model_dtype=float23"], ["'float32'"]),
        (["data.train_max_samples=0"], ["-1 (all rows)"]),
        ([f"{ACTOR}.checkpoint.save_contents=[modl]"], ["modl is unknown", "'model'"]),
        ([f"{ACTOR}.checkpoint.save_contents=[]", "trainer.save_freq=1"], ["saves nothing", "save_freq=-1"]),
    ],
    ids=lambda value: "+".join(value)[:70] if isinstance(value, list) else None,
)
def test_refused(plan_of, keys, said):
    with pytest.raises(ConfigError) as caught:
        plan_of(*keys)
    line = str(caught.value)
    assert "\n" not in line
    assert [part for part in said if part not in line] == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp", "fits"),
    [(16, 8, 4, True), (16, 2, 4, True), (14, 2, 2, True), (14, 2, 4, False), (12, 3, 2, False), (8, None, 8, True)],
)
def test_heads_against_sequence_parallel(plan_of, files, heads, kv_heads, sp, fits):
    write_model(files / "model", num_attention_heads=heads, num_key_value_heads=kv_heads)
    keys = (f"{ACTOR}.ulysses_sequence_parallel_size={sp}", "trainer.n_gpus_per_node=8")
    if fits:
        assert plan_of(*keys).actor.sp == sp
    else:
        with pytest.raises(ConfigError, match=f"ulysses_sequence_parallel_size={sp} .*heads of"):
            plan_of(*keys)


def test_the_critic_has_heads_of_its_own(plan_of, files):
    write_model(files / "critic", num_attention_heads=9, num_key_value_heads=3)
    keys = ("trainer.n_gpus_per_node=2", f"critic.model.path={files}/critic")
    assert plan_of(*keys, f"{ACTOR}.ulysses_sequence_parallel_size=2").critic.sp == 1
    with pytest.raises(ConfigError, match=r"critic\.ulysses_sequence_parallel_size=2 does not divide the 9"):
        plan_of(*keys, "critic.ulysses_sequence_parallel_size=2")


def test_a_critic_of_another_tokenizer(plan_of, files):
    write_model(files / "critic", vocab_size=100)
    with pytest.raises(ConfigError, match=r"100 tokens.*151936"):
        plan_of(f"critic.model.path={files}/critic")


def test_exactly_the_positions_of_the_model_fit(plan_of):
    plan = plan_of("data.max_prompt_length=40000", "data.max_response_length=960")
    assert plan.rollout.prompt_length + plan.rollout.response_length == 40960


def test_stretched_rope_counts(plan_of, files):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    write_model(files / "model", rope_scaling=scaling)
    plan_of("data.max_prompt_length=100000")
    with pytest.raises(ConfigError, match="163840 positions"):
        plan_of("data.max_prompt_length=163840")


def test_save_freq_with_weights_only_is_the_default(plan_of):
    assert plan_of("trainer.save_freq=2").trainer.save_freq == 2
