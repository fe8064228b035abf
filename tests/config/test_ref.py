"""The reference follows the actor unless told otherwise."""

from __future__ import annotations


def test_the_reference_computes_in_the_types_of_the_actor(plan_of):
    actor = "actor_rollout_ref.actor"
    ref = plan_of(
        f"{actor}.use_kl_loss=True", f"{actor}.fsdp_config.model_dtype=float64", f"{actor}.fsdp_config.dtype=float64"
    ).ref
    assert (ref.master_dtype, ref.compute_dtype) == ("float64", "float64")


def test_its_own_type_wins(plan_of):
    ref = plan_of(
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.fsdp_config.model_dtype=float64"
    ).ref
    assert ref.master_dtype == "float64"
