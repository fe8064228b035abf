"""The models of a run: actor, critic and reference, and how each is cut over the ranks."""

from __future__ import annotations

from typing import Any

from corral.config import names
from corral.config.names import dtype
from corral.config.paths import local_path
from corral.config.plan import EnginePlan, MicroBatches, Model, Optimizer, Topology
from corral.config.schema.fsdp import Fsdp, TrainedFsdp
from corral.config.schema.model import Model as ModelSection
from corral.config.schema.optim import Optim
from corral.config.schema.root import Config
from corral.errors import ConfigError
from corral.platform import platform

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"


def actor_engine(config: Config, where: Topology) -> EnginePlan:
    """The policy that trains; its `infer` batches are those of the old log-probs."""
    actor = config.actor_rollout_ref.actor
    return _engine(
        "actor",
        _ACTOR,
        f"{_ACTOR}.fsdp_config",
        where,
        sp=actor.ulysses_sequence_parallel_size,
        fsdp=actor.fsdp_config,
        section=config.actor_rollout_ref.model,
        infer=_log_prob_batches(config),
        train=_batches(
            f"{_ACTOR}.use_dynamic_bsz",
            actor.use_dynamic_bsz,
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            actor.ppo_micro_batch_size_per_gpu,
            actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size,
        ),
        optim=_optimizer(actor.optim),
    )


def _log_prob_batches(config: Config) -> MicroBatches:
    """How the actor's old log-probs are computed; the dynamic flag may differ from the update's."""
    rollout = config.actor_rollout_ref.rollout
    return _batches(
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
        rollout.log_prob_use_dynamic_bsz,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_max_token_len_per_gpu * config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
    )


def critic_engine(config: Config, where: Topology) -> EnginePlan:
    """The value model that trains; its `infer` batches are those of the values."""
    critic = config.critic
    sp = critic.ulysses_sequence_parallel_size
    return _engine(
        "critic",
        "critic",
        "critic.fsdp",
        where,
        sp=sp,
        fsdp=critic.fsdp,
        section=critic.model,
        train=_batches(
            "critic.use_dynamic_bsz",
            critic.use_dynamic_bsz,
            "critic.ppo_micro_batch_size_per_gpu",
            critic.ppo_micro_batch_size_per_gpu,
            critic.ppo_max_token_len_per_gpu * sp,
        ),
        infer=_batches(
            "critic.use_dynamic_bsz",
            critic.use_dynamic_bsz,
            "critic.ppo_infer_micro_batch_size_per_gpu",
            critic.ppo_infer_micro_batch_size_per_gpu,
            critic.ppo_infer_max_token_len_per_gpu * sp,
        ),
        optim=_optimizer(critic.optim),
    )


def ref_engine(config: Config, where: Topology) -> EnginePlan:
    """The frozen reference: the actor's first weights."""
    ref = config.actor_rollout_ref.ref
    sp = ref.ulysses_sequence_parallel_size
    return _engine(
        "ref",
        _REF,
        f"{_REF}.fsdp_config",
        where,
        sp=sp,
        fsdp=ref.fsdp_config,
        section=config.actor_rollout_ref.model,
        infer=_batches(
            f"{_REF}.log_prob_use_dynamic_bsz",
            ref.log_prob_use_dynamic_bsz,
            f"{_REF}.log_prob_micro_batch_size_per_gpu",
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_max_token_len_per_gpu * sp,
        ),
    )


def _engine(
    role: str,
    block: str,
    fsdp_block: str,
    where: Topology,
    *,
    sp: int,
    fsdp: Fsdp,
    section: ModelSection,
    infer: MicroBatches,
    train: MicroBatches | None = None,
    optim: Optimizer | None = None,
) -> EnginePlan:
    if where.world % sp:
        raise ConfigError(
            f"{block}.ulysses_sequence_parallel_size={sp} does not divide the world of {where.world} ranks "
            f"({where.nnodes} nodes × {where.devices_per_node} devices); use one of {divisors(where.world)}"
        )
    facts = platform(where.device)
    compute = facts.compute_dtype if fsdp.dtype is None else dtype(f"{fsdp_block}.dtype", fsdp.dtype)
    master = dtype(f"{fsdp_block}.model_dtype", fsdp.model_dtype)
    for name, chosen in (("dtype", compute), ("model_dtype", master)):
        if chosen not in facts.dtypes:
            raise ConfigError(
                f"{fsdp_block}.{name}={chosen}: {where.device} trains in {' or '.join(facts.dtypes)}; float64 is for "
                "checks, on cpu or cuda"
            )
    return EnginePlan(
        role=role,
        model=_model(section, where.device),
        sp=sp,
        dp=where.world // sp,
        master_dtype=master,
        compute_dtype=compute,
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload if isinstance(fsdp, TrainedFsdp) else False,
        reshard_after_forward=fsdp.reshard_after_forward,
        use_torch_compile=fsdp.use_torch_compile and role != "critic",  # what is compiled is the log-probs
        seed=fsdp.seed,
        infer=infer,
        train=train,
        optim=optim,
        attention=_attention(section, where.device),
    )


def _attention(model: ModelSection, device: str) -> str:
    """Which kernel attends: of the familiar names those that cuda has; other devices have one kernel each."""
    name = model.override_config.get("attn_implementation")
    if device != "cuda" or name is None:
        return "auto"
    if name not in names.ATTENTION:
        raise ConfigError(
            f"override_config.attn_implementation={name!r} is not one of {', '.join(names.ATTENTION)} on cuda; leave "
            "it out for PyTorch's variable-length kernel"
        )
    return str(name)


def _batches(flag_key: str, dynamic: bool, samples_key: str, samples: int | None, token_budget: int) -> MicroBatches:
    if dynamic:
        return MicroBatches(token_budget=token_budget, samples=None)
    if samples is None:
        raise ConfigError(f"{flag_key}=False needs {samples_key}; set it (1 always fits), or {flag_key}=True")
    return MicroBatches(token_budget=None, samples=samples)


def _optimizer(optim: Optim) -> Optimizer:
    return Optimizer(
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
    )


def _model(model: ModelSection, device: str) -> Model:
    path = str(model.path)  # checked before: never null here
    override: dict[str, Any] = dict(model.override_config)
    override.pop("attn_implementation", None)  # attention is plugged in by the engine; cuda has a choice of kernels
    return Model(
        path=local_path(path),
        tokenizer_path=local_path(model.tokenizer_path or path),
        trust_remote_code=model.trust_remote_code,
        override_config=override,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        fused_modules=model.fused_modules and device == "npu",
    )


def divisors(number: int) -> str:
    return ", ".join(str(k) for k in range(1, number + 1) if number % k == 0)
