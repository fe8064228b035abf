"""Why a key has no effect in a run: the conditions under which parts of a run are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from corral.config import names
from corral.config.check import validates
from corral.config.plan import Plan
from corral.config.schema.critic import Critic
from corral.config.validate import Values

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"
_TRAINED = ("actor", "critic")

VLLM_ONLY = tuple(
    f"{_ROLLOUT}.{name}"
    for name in (
        "gpu_memory_utilization",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "free_cache_engine",
        "max_num_batched_tokens",
        "max_model_len",
        "load_format",
        "dtype",
        "engine_kwargs",
    )
)


def reasons_by_key(values: Values, plan: Plan) -> dict[str, str]:
    """Key or block → why it has no effect here. Blocks cover every key inside them."""
    return {
        **_batching(values),
        **_generation(plan),
        **_engine_options(values, plan),
        **_update(values, plan),
        **_advantages(plan),
        **_policy_loss(values, plan),
        **_correction(plan),
        **_running(plan),
        **_roles(plan),
    }


def reason(key: str, reasons: Mapping[str, str]) -> str | None:
    """Why the key has no effect, None when it has one; a block's reason comes before that of a key inside it."""
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((reasons[prefix] for prefix in prefixes if prefix in reasons), None)


def _batching(values: Values) -> dict[str, str]:
    """Sample counts under a token budget, and the other way round."""
    out = {}
    for flag, samples, tokens in (
        (
            f"{_ACTOR}.use_dynamic_bsz",
            (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",),
            (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
        ),
        (
            f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
            (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",),
            (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",),
        ),
        (
            f"{_REF}.log_prob_use_dynamic_bsz",
            (f"{_REF}.log_prob_micro_batch_size_per_gpu",),
            (f"{_REF}.log_prob_max_token_len_per_gpu",),
        ),
        (
            "critic.use_dynamic_bsz",
            ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_infer_micro_batch_size_per_gpu"),
            ("critic.ppo_max_token_len_per_gpu", "critic.ppo_infer_max_token_len_per_gpu"),
        ),
    ):
        name = flag.rpartition(".")[2]
        if values[flag]:
            out.update(dict.fromkeys(samples, f"{name}=True: micro-batches follow the token budget"))
        else:
            out.update(dict.fromkeys(tokens, f"{name}=False: micro-batches count samples"))
    return out


def _generation(plan: Plan) -> dict[str, str]:
    out = {f"{_ROLLOUT}.calculate_log_probs": "log-probs are always recorded"}
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


def _engine_options(values: Values, plan: Plan) -> dict[str, str]:
    """What the engine that runs does not take."""
    kwargs, device = f"{_ROLLOUT}.engine_kwargs", plan.topology.device
    out = {}
    if plan.rollout.vllm is None:
        out.update(dict.fromkeys(VLLM_ONLY, "an option of vllm; the native engine generates"))
        out[f"{_ROLLOUT}.dtype"] = "the native engine decodes in the actor's compute dtype"
        if set(values[kwargs]) - {"vllm"}:
            out[kwargs] = "the native engine takes no options of its own"
        if device != "cuda":
            out[f"{_ROLLOUT}.enforce_eager"] = "the native engine has device graphs on cuda only"
        return out
    for other in set(values[kwargs]) - {"vllm"}:
        out[f"{kwargs}.{other}"] = f"options of {other}; vllm generates"
    if device == "cpu":
        out[f"{_ROLLOUT}.free_cache_engine"] = "vllm keeps its memory on cpu"
        out[f"{_ROLLOUT}.enforce_eager"] = "vllm compiles nothing on cpu"
        out[f"{_ROLLOUT}.enable_chunked_prefill"] = "vllm computes a prompt in one step on cpu"
        out[f"{_ROLLOUT}.gpu_memory_utilization"] = (
            "on cpu vllm has 1 GiB a rank for keys and values, or engine_kwargs.vllm.kv_cache_memory_bytes"
        )
    return out


def _update(values: Values, plan: Plan) -> dict[str, str]:
    out = {}
    picks = plan.actor_update.loss_mode == "clip_cov" or plan.actor_update.loss_mode not in names.LOSSES
    for role in (_ACTOR, "critic"):
        if not values[f"{role}.shuffle"] and not (role == _ACTOR and picks):
            out[f"{role}.data_loader_seed"] = "shuffle=False: mini-batches keep the prompt order"
        if values[f"{role}.loss_agg_mode"] != "seq-mean-token-sum-norm":
            out[f"{role}.loss_scale_factor"] = "only loss_agg_mode=seq-mean-token-sum-norm divides by it"
        if values[f"{role}.optim.lr_warmup_steps"] >= 0:
            out[f"{role}.optim.lr_warmup_steps_ratio"] = "optim.lr_warmup_steps is set"
        if values[f"{role}.optim.lr_scheduler_type"] == "constant":
            out[f"{role}.optim.min_lr_ratio"] = "a constant schedule does not decay"
        if values[f"{role}.optim.lr_scheduler_type"] != "cosine":
            out[f"{role}.optim.num_cycles"] = "only a cosine schedule has cycles"
    if plan.topology.device != "cuda":
        for block in ("actor_rollout_ref.model", "critic.model"):
            out[f"{block}.override_config.attn_implementation"] = (
                f"attention is plugged in by the engine, which has one kernel on {plan.topology.device}"
            )
    if plan.topology.device != "npu":
        for block in ("actor_rollout_ref.model", "critic.model"):
            out[f"{block}.fused_modules"] = "kernels of npu alone"
    out["critic.fsdp.use_torch_compile"] = "the critic computes no log-probs, which is what is compiled"
    out["actor_rollout_ref.actor.fsdp_config.seed"] = "the actor has no newly initialised weights"
    out[f"{_REF}.fsdp_config.seed"] = "the reference has no newly initialised weights"
    return out


def _roles(plan: Plan) -> dict[str, str]:
    out = {}
    estimator = plan.algorithm.adv_estimator
    known = estimator in names.ESTIMATORS
    if known:
        out["critic.enable"] = f"adv_estimator={estimator} decides"
    if plan.critic is None:
        why = f"adv_estimator={estimator} reads no values" if known else "critic.enable is not True"
        out.update({f"critic.{item.name}": f"no critic: {why}" for item in fields(Critic) if item.name != "enable"})
        out["trainer.critic_warmup"] = "there is no critic to warm up"
        out["trainer.max_critic_ckpt_to_keep"] = "there is no critic to save"
    if plan.ref is None:
        out[_REF] = "no reference model is needed: use_kl_loss and use_kl_in_reward are off"
    return out


def _advantages(plan: Plan) -> dict[str, str]:
    algorithm, out = plan.algorithm, {}
    facts = names.ESTIMATORS.get(algorithm.adv_estimator)
    if facts:  # a user's estimator is given everything
        for name in names.ESTIMATOR_OPTIONS:
            if name not in facts.reads:
                out[f"algorithm.{name}"] = f"adv_estimator={algorithm.adv_estimator} does not read it"
        out[f"{_ACTOR}.calculate_sum_pi_squared"] = (
            f"adv_estimator={algorithm.adv_estimator} needs it, so it is computed"
            if facts.sum_pi_squared
            else f"adv_estimator={algorithm.adv_estimator} does not read it"
        )
    if not algorithm.use_kl_in_reward:
        for name in ("kl_penalty", "kl_ctrl"):
            out[f"algorithm.{name}"] = "use_kl_in_reward=False"
    elif algorithm.kl_ctrl.type == "fixed":
        for name in ("horizon", "target_kl"):
            out[f"algorithm.kl_ctrl.{name}"] = "kl_ctrl.type=fixed does not adapt"
    if algorithm.filter_groups is None:
        for name in ("metric", "max_num_gen_batches"):
            out[f"algorithm.filter_groups.{name}"] = "filter_groups.enable=False"
    if algorithm.pf_ppo is None:
        out["algorithm.pf_ppo"] = "use_pf_ppo=False"
    elif algorithm.pf_ppo.reweight_method != "pow":
        out["algorithm.pf_ppo.weight_pow"] = f"reweight_method={algorithm.pf_ppo.reweight_method} takes no power"
    return out


def _policy_loss(values: Values, plan: Plan) -> dict[str, str]:
    update, out = plan.actor_update, {}
    correction = plan.algorithm.rollout_correction
    facts = names.LOSSES.get(update.loss_mode)
    if facts:  # a user's loss is given everything
        reinforce = correction is not None and correction.bypass_mode and correction.loss_type == "reinforce"
        shown = "loss_type=reinforce" if reinforce else f"loss_mode={update.loss_mode}"
        for name in names.LOSS_OPTIONS:
            if reinforce or name not in facts.reads:
                out[f"{_ACTOR}.{name}"] = f"{shown} does not read it"
        if facts.aggregation:
            out[f"{_ACTOR}.loss_agg_mode"] = f"loss_mode={update.loss_mode} is always a {facts.aggregation}"
            out[f"{_ACTOR}.loss_scale_factor"] = out[f"{_ACTOR}.loss_agg_mode"]
    if not update.use_kl_loss:
        for name in ("kl_loss_coef", "kl_loss_type"):
            out[f"{_ACTOR}.{name}"] = "use_kl_loss=False"
    if values[f"{_ACTOR}.entropy_coeff"] != 0:
        out[f"{_ACTOR}.calculate_entropy"] = "entropy_coeff is not 0, so the entropy is computed"
    return out


def _correction(plan: Plan) -> dict[str, str]:
    correction, out = plan.algorithm.rollout_correction, {}
    weights = ("rollout_is_threshold", "rollout_is_batch_normalize")
    if correction is None or correction.rollout_is is None:
        for name in weights:
            out[f"{_CORRECTION}.{name}"] = "rollout_correction.rollout_is is not set"
    if correction is None or not correction.rejections:
        out[f"{_CORRECTION}.rollout_rs_threshold"] = "rollout_correction.rollout_rs is not set"
    if correction is None or not correction.bypass_mode:
        out[f"{_CORRECTION}.loss_type"] = "rollout_correction.bypass_mode=False: policy_loss.loss_mode decides"
        return out
    out[f"{_ACTOR}.policy_loss.loss_mode"] = "rollout_correction.bypass_mode=True brings a loss of its own"
    weighted = correction.loss_type == "reinforce" and correction.rollout_is is not None
    if correction.loss_type == "ppo_clip":
        for name in ("rollout_is", *weights):
            out[f"{_CORRECTION}.{name}"] = (
                "loss_type=ppo_clip clips the ratio to the engine, which is the weight itself"
            )
    if not correction.rejections and not weighted and not plan.algorithm.sum_pi_squared:
        for name in ("use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            out[f"{_ROLLOUT}.log_prob_{name}"] = "rollout_correction.bypass_mode=True computes no old log-probs"
    return out


def _running(plan: Plan) -> dict[str, str]:
    out = {}
    if plan.topology.world == 1:
        for block in (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp"):
            out[f"{block}.reshard_after_forward"] = "a single rank holds whole parameters"
        out["trainer.collective_check"] = "a single rank has nobody to talk to"
    if not plan.skip.enable:
        for name in ("project_name", "experiment_name"):
            out[f"trainer.{name}"] = "trainer.default_local_dir is set and skip.rollout is off"
    if not plan.data.shuffle and plan.algorithm.pf_ppo is None:
        out["data.seed"] = "data.shuffle=False: rows keep their order"
    if plan.data.filter_overlong_prompts:
        out["data.truncation"] = "filter_overlong_prompts=True drops longer prompts"
    if plan.trainer.save_freq <= 0:
        for key in (f"{_ACTOR}.checkpoint.save_contents", *(f"trainer.max_{role}_ckpt_to_keep" for role in _TRAINED)):
            out[key] = "trainer.save_freq is off"
    if plan.trainer.save_freq <= 0 or "hf_model" not in plan.trainer.save_contents:
        out["critic.model.tokenizer_path"] = "it is only saved with the critic's hf_model, and none is saved"
    if plan.trainer.resume_mode != "resume_path":
        out["trainer.resume_from_path"] = f"only resume_mode=resume_path reads it, not {plan.trainer.resume_mode}"
    if plan.topology.ray_address is None:
        out["trainer.cluster_wait"] = "no cluster is joined: RAY_ADDRESS is not set"
    if plan.topology.device != "cpu" and validates(plan):
        out["trainer.val_cost_rows"] = "the cost is estimated on cpu only"
    if plan.reward.custom_path is None:
        out["reward.custom_reward_function.name"] = "reward.custom_reward_function.path is not set"
    return out
