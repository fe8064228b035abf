"""A small valid Plan for tests that need one without resolving a configuration."""

from __future__ import annotations

from corral.config.plan import (
    ActorUpdate,
    AlgorithmPlan,
    CriticUpdate,
    DataPlan,
    EnginePlan,
    KLControl,
    MicroBatches,
    Model,
    Optimizer,
    Plan,
    RewardPlan,
    RolloutPlan,
    Sampling,
    SkipPlan,
    Topology,
    TrainerPlan,
)


def tiny_engine(
    role: str = "actor", *, world: int = 1, sp: int = 1, path: str = "", dtype: str = "float32"
) -> EnginePlan:
    """One engine over `world` ranks with AdamW at lr 1e-3 and a small token budget."""
    return EnginePlan(
        role=role,
        model=Model(path, path, False, {}, gradient_checkpointing=False),
        sp=sp,
        dp=world // sp,
        master_dtype=dtype,
        compute_dtype=dtype,
        param_offload=False,
        optimizer_offload=False,
        reshard_after_forward=True,
        use_torch_compile=False,
        seed=42,
        infer=MicroBatches(1024, None),
        train=MicroBatches(1024, None),
        optim=Optimizer(1e-3, (0.9, 0.999), 0.01, 1.0, "constant", -1, 0.0, 0.0, 0.5),
    )


def tiny_plan(*, world: int = 1, sp: int = 1, path: str = "", dtype: str = "float32") -> Plan:
    """8 prompts a step in two mini-batches, GAE, one sample a prompt."""
    sampling = Sampling(1.0, -1, 1.0, True, 1)
    return Plan(
        topology=Topology("cpu", 1, world, "in_process" if world == 1 else "ray", None),
        data=DataPlan((), (), "prompt", 8, 64, 32, "error", False, False, 42, -1, -1, {}),
        actor=tiny_engine("actor", world=world, sp=sp, path=path, dtype=dtype),
        actor_update=ActorUpdate(
            4, 1, False, 42, "vanilla", 0.2, 0.2, 3.0, "token-mean", None, 0.0, False, False, 0.001, "low_var_kl", 2
        ),
        critic=tiny_engine("critic", world=world, sp=sp, path=path, dtype=dtype),
        critic_update=CriticUpdate(4, 1, False, 42, 0.5, "token-mean", None, 2),
        ref=None,
        rollout=RolloutPlan("native", "native", world, 1, 64, 32, 64, False, 42, sampling, sampling, 1e-3),
        skip=SkipPlan(False, "", (), "cache"),
        reward=RewardPlan(None, "compute_score", {}, 1, 10.0),
        algorithm=AlgorithmPlan("gae", 1.0, 1.0, False, "kl", KLControl("fixed", 0.001, 10000, 0.1)),
        trainer=TrainerPlan("p", "e", "", "", ("console",), 1, 1, 0, True, -1, -1, False, False, 100, None, 10.0),
    )
