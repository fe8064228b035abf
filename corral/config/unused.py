"""Keys that were set but have no effect in this run, each with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from corral.config.check import validates
from corral.config.overrides import Override
from corral.config.plan import Plan, Unused
from corral.config.validate import Values

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"

VLLM_ONLY = tuple(
    f"{_ROLLOUT}.{name}"
    for name in (
        "gpu_memory_utilization",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "free_cache_engine",
        "max_num_batched_tokens",
        "max_model_len",
        "load_format",
        "dtype",
        "engine_kwargs",
    )
)


def unused(overrides: Sequence[Override], values: Values, plan: Plan) -> tuple[Unused, ...]:
    """The overrides that nothing reads, in the order given."""
    reasons = reasons_by_key(values, plan)
    out = []
    for override in overrides:
        found = [_reason(key, reasons) for key in override.keys]
        reason = found[0]
        if reason is not None and all(found):
            out.append(Unused(override.given, override.text, reason))
    return tuple(out)


def reasons_by_key(values: Values, plan: Plan) -> dict[str, str]:
    """Key or block → why it has no effect here. Blocks cover every key inside them."""
    return {
        **_batching(values, plan),
        **_generation(plan),
        **_update(values, plan),
        **_running(plan),
    }


def _reason(key: str, reasons: dict[str, str]) -> str | None:
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((reasons[prefix] for prefix in prefixes if prefix in reasons), None)


def _batching(values: Values, plan: Plan) -> dict[str, str]:
    """Sample counts under a token budget, and the other way round. A key that another one inherits stays used."""
    actor, rollout = values[f"{_ACTOR}.use_dynamic_bsz"], values[f"{_ROLLOUT}.log_prob_use_dynamic_bsz"]
    critic, ref = values["critic.use_dynamic_bsz"], values[f"{_REF}.log_prob_use_dynamic_bsz"]
    ref_dynamic, ref_static = plan.ref is None or ref, plan.ref is None or not ref
    out = {}
    if actor:
        out[f"{_ACTOR}.ppo_micro_batch_size_per_gpu"] = "use_dynamic_bsz=True: micro-batches follow the token budget"
    elif not rollout and ref_static:
        out[f"{_ACTOR}.ppo_max_token_len_per_gpu"] = "use_dynamic_bsz=False: micro-batches count samples"
    if rollout and ref_dynamic:
        out[f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"] = (
            "log_prob_use_dynamic_bsz=True: micro-batches follow the token budget"
        )
    elif not rollout:
        out[f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"] = (
            "log_prob_use_dynamic_bsz=False: micro-batches count samples"
        )
    kind = "micro_batch_size" if critic else "max_token_len"
    why = "True: micro-batches follow the token budget" if critic else "False: micro-batches count samples"
    for name in (f"ppo_{kind}_per_gpu", f"ppo_infer_{kind}_per_gpu"):
        out[f"critic.{name}"] = f"use_dynamic_bsz={why}"
    ref_kind = "micro_batch_size" if ref else "max_token_len"
    out[f"{_REF}.log_prob_{ref_kind}_per_gpu"] = f"log_prob_use_dynamic_bsz={ref}"
    return out


def _generation(plan: Plan) -> dict[str, str]:
    out = dict.fromkeys(VLLM_ONLY, "an option of vllm; the native engine generates")
    out[f"{_ROLLOUT}.dtype"] = "the native engine decodes in the actor's compute dtype"
    out[f"{_ROLLOUT}.calculate_log_probs"] = "the native engine always records log-probs"
    if plan.rollout.requested == plan.rollout.name:
        out[f"{_ROLLOUT}.fallback"] = "the requested engine runs"
    if plan.rollout.sampling.greedy:
        for name in ("top_k", "top_p"):
            out[f"{_ROLLOUT}.{name}"] = "rollout.do_sample=False is greedy"
        if plan.rollout.val_sampling.greedy or not validates(plan):
            out[f"{_ROLLOUT}.seed"] = "nothing is drawn at random"
    if not validates(plan):
        nothing = "no validation runs: test_freq, val_before_train and val_only are off"
        for key in ("data.val_files", "data.val_max_samples", "trainer.val_cost_rows", f"{_ROLLOUT}.val_kwargs"):
            out[key] = nothing
    elif plan.rollout.val_sampling.greedy:
        for name in ("temperature", "top_k", "top_p"):
            out[f"{_ROLLOUT}.val_kwargs.{name}"] = "val_kwargs.do_sample=False is greedy"
    if not plan.skip.enable:
        for name in ("dump_dir", "steps", "action"):
            out[f"skip.rollout.{name}"] = "skip.rollout.enable=False"
    return out


def _update(values: Values, plan: Plan) -> dict[str, str]:
    out = {}
    for role in (_ACTOR, "critic"):
        if not values[f"{role}.shuffle"]:
            out[f"{role}.data_loader_seed"] = "shuffle=False: mini-batches keep the prompt order"
        if values[f"{role}.loss_agg_mode"] != "seq-mean-token-sum-norm":
            out[f"{role}.loss_scale_factor"] = "only loss_agg_mode=seq-mean-token-sum-norm divides by it"
        if values[f"{role}.optim.lr_warmup_steps"] >= 0:
            out[f"{role}.optim.lr_warmup_steps_ratio"] = "optim.lr_warmup_steps is set"
        if values[f"{role}.optim.lr_scheduler_type"] == "constant":
            out[f"{role}.optim.min_lr_ratio"] = "a constant schedule does not decay"
        if values[f"{role}.optim.lr_scheduler_type"] != "cosine":
            out[f"{role}.optim.num_cycles"] = "only a cosine schedule has cycles"
    if not plan.actor_update.use_kl_loss:
        for name in ("kl_loss_coef", "kl_loss_type"):
            out[f"{_ACTOR}.{name}"] = "use_kl_loss=False"
    for name in ("horizon", "target_kl"):
        out[f"algorithm.kl_ctrl.{name}"] = "kl_ctrl.type=fixed does not adapt"
    if not plan.algorithm.use_kl_in_reward:
        out["algorithm.kl_penalty"] = "use_kl_in_reward=False"
        out["algorithm.kl_ctrl"] = "use_kl_in_reward=False"
    if plan.ref is None:
        out[_REF] = "no reference model is needed: use_kl_loss and use_kl_in_reward are off"
    for block in ("actor_rollout_ref.model", "critic.model"):
        out[f"{block}.override_config.attn_implementation"] = "attention is plugged in by the engine"
    out["critic.fsdp.use_torch_compile"] = "the critic computes no log-probs, which is what is compiled"
    out["actor_rollout_ref.actor.fsdp_config.seed"] = "the actor has no newly initialised weights"
    out[f"{_REF}.fsdp_config.seed"] = "the reference has no newly initialised weights"
    return out


def _running(plan: Plan) -> dict[str, str]:
    out = {}
    if not plan.data.shuffle:
        out["data.seed"] = "data.shuffle=False: rows keep their order"
    if plan.data.filter_overlong_prompts:
        out["data.truncation"] = "filter_overlong_prompts=True drops longer prompts"
    if plan.trainer.save_freq <= 0:
        out[f"{_ACTOR}.checkpoint.save_contents"] = "trainer.save_freq is off"
    if plan.topology.ray_address is None:
        out["trainer.cluster_wait"] = "no cluster is joined: RAY_ADDRESS is not set"
    if plan.topology.device != "cpu" and validates(plan):
        out["trainer.val_cost_rows"] = "the cost is estimated on cpu only"
    if plan.reward.custom_path is None:
        out["reward.custom_reward_function.name"] = "reward.custom_reward_function.path is not set"
    return out
