"""Two spellings of one key: either works, both may agree, and disagreeing is refused."""

from __future__ import annotations

import pytest

from corral.errors import ConfigError

ARR = "actor_rollout_ref"
PAIRS = [
    (f"{ARR}.actor.fsdp_config.ulysses_sequence_parallel_size", f"{ARR}.actor.ulysses_sequence_parallel_size", 2, 4,
     lambda plan: plan.actor.sp),
    ("critic.fsdp.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size", 2, 4,
     lambda plan: plan.critic.sp),
    (f"{ARR}.actor.use_torch_compile", f"{ARR}.actor.fsdp_config.use_torch_compile", True, False,
     lambda plan: plan.actor.use_torch_compile),
    (f"{ARR}.actor.grad_clip", f"{ARR}.actor.optim.clip_grad", 0.25, 0.5, lambda plan: plan.actor.optim.clip_grad),
    ("critic.grad_clip", "critic.optim.clip_grad", 0.25, 0.5, lambda plan: plan.critic.optim.clip_grad),
    ("critic.fsdp_config.param_offload", "critic.fsdp.param_offload", True, False,
     lambda plan: plan.critic.param_offload),
    ("critic.model.fsdp_config.optimizer_offload", "critic.fsdp.optimizer_offload", True, False,
     lambda plan: plan.critic.optimizer_offload),
    ("critic.model.fsdp_config.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size", 2, 4,
     lambda plan: plan.critic.sp),
    ("custom_reward_function.path", "reward.custom_reward_function.path", "my.rewards", "other.rewards",
     lambda plan: plan.reward.custom_path),
    ("custom_reward_function.name", "reward.custom_reward_function.name", "score", "other",
     lambda plan: plan.reward.custom_name),
    *((f"{ARR}.{block}.full_determinism", "trainer.full_determinism", True, False,
       lambda plan: plan.trainer.full_determinism) for block in ("actor.fsdp_config", "rollout")),
    (f"{ARR}.rollout.response_length", "data.max_response_length", 64, 32, lambda plan: plan.rollout.response_length),
    (f"{ARR}.rollout.prompt_length", "data.max_prompt_length", 64, 32, lambda plan: plan.data.max_prompt_length),
]  # fmt: skip


@pytest.mark.parametrize(("alias", "key", "value", "other", "read"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_both_spellings(plan_of, alias, key, value, other, read):
    world = "trainer.n_gpus_per_node=4"
    assert read(plan_of(world, f"{alias}={value}")) == value
    assert read(plan_of(world, f"{key}={value}")) == value
    assert read(plan_of(world, f"{key}={value}", f"{alias}={value}")) == value
    with pytest.raises(ConfigError, match="disagree") as caught:
        plan_of(world, f"{alias}={value}", f"{key}={other}")
    assert f"{alias}={value}" in str(caught.value)
    assert f"{key}={other}" in str(caught.value)


def test_the_last_of_one_spelling_wins(plan_of):
    key = "critic.ulysses_sequence_parallel_size"
    assert plan_of("trainer.n_gpus_per_node=4", f"{key}=4", f"{key}=2").critic.sp == 2


def test_clip_ratio_alone_takes_effect(plan_of):
    update = plan_of(f"{ARR}.actor.clip_ratio=0.3").actor_update
    assert (update.clip_ratio_low, update.clip_ratio_high) == (0.3, 0.3)


def test_clip_ratio_low_and_high(plan_of):
    update = plan_of(f"{ARR}.actor.clip_ratio_high=0.28").actor_update
    assert (update.clip_ratio_low, update.clip_ratio_high) == (0.2, 0.28)
    with pytest.raises(ConfigError, match="disagree"):
        plan_of(f"{ARR}.actor.clip_ratio=0.3", f"{ARR}.actor.clip_ratio_high=0.28")


def test_equal_numbers_in_other_letters_agree(plan_of):
    assert plan_of(f"{ARR}.actor.grad_clip=1e-1", f"{ARR}.actor.optim.clip_grad=0.1").actor.optim.clip_grad == 0.1
