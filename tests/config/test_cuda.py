"""Keys that only cuda reads."""

from __future__ import annotations

import pytest

from corral.config.show import render
from corral.errors import ConfigError

ARR = "actor_rollout_ref"
KERNEL = f"{ARR}.model.override_config.attn_implementation"
CUDA = "trainer.device=cuda"


@pytest.mark.parametrize(
    ("keys", "attention"),
    [([], "auto"), ([f"{KERNEL}=null"], "auto"), ([f"{KERNEL}=flash_attention_2"], "flash_attention_2")],
)
def test_the_attention_kernel(plan_of, keys, attention):
    plan = plan_of(CUDA, *(f"+{key}" for key in keys))
    assert plan.actor.attention == attention
    assert KERNEL not in {item.key for item in plan.unused}
    assert ("attention by flash-attn" in render(plan)) == (attention == "flash_attention_2")


def test_a_kernel_that_cuda_does_not_have(plan_of):
    with pytest.raises(ConfigError, match=r"attn_implementation='eager' is not one of flash_attention_2, sdpa on cuda"):
        plan_of(CUDA, f"+{KERNEL}=eager")


def test_the_critic_has_a_choice_of_its_own(plan_of):
    plan = plan_of(CUDA, "+critic.model.override_config.attn_implementation=sdpa")
    assert plan.critic is not None
    assert (plan.actor.attention, plan.critic.attention) == ("auto", "sdpa")


def test_device_graphs_unless_eager_and_on_cuda_only(plan_of):
    eager = f"{ARR}.rollout.enforce_eager=True"
    assert [plan_of(*keys).rollout.graphs for keys in ([CUDA], [CUDA, eager], [])] == [True, False, False]
    assert "device graphs" in render(plan_of(CUDA))


def test_what_is_worth_knowing_is_said(plan_of):
    dtypes = [f"{block}.dtype=float32" for block in (f"{ARR}.actor.fsdp_config", "critic.fsdp")]
    notices = "\n".join(plan_of(CUDA, *dtypes).notices)
    assert "actor, critic: the variable-length attention kernels of cuda are in half precision only" in notices
    assert "tested without a device only; docs/devices.md" in notices
    assert "half precision" not in "\n".join(plan_of(CUDA).notices)
