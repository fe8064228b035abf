"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from corral.config import names
from corral.config.plan import AlgorithmPlan, EnginePlan, MicroBatches, Optimizer, Plan, RolloutPlan, Sampling, VllmPlan

Row = tuple[str, str]


def as_json(plan: Plan) -> str:
    """The content of plan.json."""
    return json.dumps(plan.as_dict(), indent=2)


def render(plan: Plan) -> str:
    """One aligned line per fact, then what deserves attention, then the keys without effect under their reasons."""
    rows = [*_where(plan), *_iteration(plan), *_engines(plan), *_memory(plan), *_generation(plan), *_records(plan)]
    lines = ["plan", *_aligned(rows)]
    if plan.notices:
        lines += ["notices", *(f"  {notice}" for notice in plan.notices)]
    if plan.unused:
        lines.append("unused")
        for reason in dict.fromkeys(item.reason for item in plan.unused):
            lines.append(f"  {reason}")
            lines += [f"    {item.key}={item.value}" for item in plan.unused if item.reason == reason]
    return "\n".join(lines)


def _aligned(rows: Sequence[Row]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _where(plan: Plan) -> list[Row]:
    top = plan.topology
    kind = "logical device" if top.device == "cpu" else "device"
    how = {"in_process": "in this process", "ray": f"on Ray at {top.ray_address}"}[top.launcher]
    if top.launcher == "ray" and top.ray_address is None:
        how = "on local Ray nodes"
    size = f"{_count(top.nnodes, 'node')} × {_count(top.devices_per_node, kind)}"
    return [("world", f"{top.world} = {size}, {top.device}, {how}")]


def _iteration(plan: Plan) -> list[Row]:
    data, actor, critic = plan.data, plan.actor_update, plan.critic_update
    rows = [
        ("train files", ", ".join(data.train_files)),
        (
            "iteration",
            f"{plan.samples_per_step} samples = {_count(data.train_batch_size, 'prompt')} × "
            f"{plan.rollout.sampling.n}; prompt up to {data.max_prompt_length}, response up to "
            f"{data.max_response_length} tokens",
        ),
        (
            "advantages",
            _advantages(plan.algorithm),
        ),
        (
            "actor update",
            f"{_count(actor.optimizer_steps, 'optimizer step')} of {_count(actor.mini_batch_prompts, 'prompt')}, "
            f"{actor.loss_mode}, {actor.loss_agg_mode}",
        ),
    ]
    if critic:
        rows.append(
            (
                "critic update",
                f"{_count(critic.optimizer_steps, 'optimizer step')} of {_count(critic.mini_batch_prompts, 'prompt')}, "
                f"{critic.loss_agg_mode}",
            )
        )
    return [*rows, *_correction(plan)]


def _advantages(algorithm: AlgorithmPlan) -> str:
    facts = names.ESTIMATORS.get(algorithm.adv_estimator)
    parts = [algorithm.adv_estimator]
    if facts is None or "gamma" in facts.reads:
        parts.append(f"gamma {algorithm.gamma:g}")
    if facts is None or "lam" in facts.reads:
        parts.append(f"lambda {algorithm.lam:g}")
    if facts and "norm_adv_by_std_in_grpo" in facts.reads and not algorithm.norm_adv_by_std_in_grpo:
        parts.append("not divided by the standard deviation")
    if algorithm.gdpo_reward_keys:
        weighed = zip(algorithm.gdpo_reward_weights, algorithm.gdpo_reward_keys, strict=True)
        parts.append(" + ".join(f"{weight:g} × {key}" for weight, key in weighed))
    if algorithm.use_kl_in_reward:
        parts.append(f"{algorithm.kl_ctrl.kl_coef:g} × KL in the reward ({algorithm.kl_ctrl.type})")
    if algorithm.filter_groups:
        parts.append(f"only groups whose {algorithm.filter_groups.metric} varies")
    if algorithm.pf_ppo:
        parts.append(f"resampled by {algorithm.pf_ppo.reweight_method}")
    return ", ".join(parts)


def _correction(plan: Plan) -> list[Row]:
    correction = plan.algorithm.rollout_correction
    if correction is None:
        return []
    parts = [f"old log-probs of the engine, {correction.loss_type}"] if correction.bypass_mode else []
    if correction.rollout_is:
        lower, upper = correction.lower, f"{correction.upper:g}"
        bound = f"cut to {upper}" if lower is None else f"zero outside {lower:g} to {upper}"
        parts.append(f"weights by {correction.rollout_is}, {bound}")
    for rule in correction.rejections:
        allowed = f"up to {rule.upper:g}" if rule.lower is None else f"{rule.lower:g} to {rule.upper:g}"
        parts.append(f"{rule.criterion} {allowed}")
    return [("correction", "; ".join(parts))]


def _engines(plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for engine in (plan.actor, plan.critic, plan.ref):
        if engine:
            rows.append((engine.role, _engine(engine)))
            rows.append((f"{engine.role} model", engine.model.path))
            if engine.optim:
                rows.append((f"{engine.role} optimizer", _optimizer(engine.optim)))
    return rows


def _engine(engine: EnginePlan) -> str:
    flags = {"parameters": engine.param_offload, "optimizer": engine.optimizer_offload}
    offloaded = " and ".join(name for name, on in flags.items() if on)
    batches = f"infer {_batches(engine.infer)}"
    if engine.train:
        batches = f"train {_batches(engine.train)}, {batches}"
    parts = [
        f"SP {engine.sp}, DP {engine.dp}",
        f"micro-batch: {batches}",
        f"{engine.compute_dtype} on {engine.master_dtype} weights",
        f"attention by {names.ATTENTION[engine.attention]}" if engine.attention != "auto" else "",
        f"offload {offloaded}" if offloaded else "",
        "fused modules" if engine.model.fused_modules else "",
        "compiled" if engine.use_torch_compile else "",
    ]
    return "; ".join(part for part in parts if part)


def _memory(plan: Plan) -> list[Row]:
    """What a rank holds by itself, and how that adds up on a node; activations come on top."""
    if not plan.memory:
        return [("memory", "not known: the weights are not in safetensors files")]
    total, devices = plan.rank_memory, plan.topology.devices_per_node
    node = f", {_size(total * devices)} a node" if devices > 1 else ""
    each = [f"{held.role} {_size(held.weights + held.optimizer)}" for held in plan.memory]
    parts = ", ".join([*each, f"gradients of one model {_size(max(held.gradients for held in plan.memory))}"])
    return [("memory", f"about {_size(total)} a rank{node}, before activations and key/value cache: {parts}")]


def _size(number: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _batches(batches: MicroBatches) -> str:
    if batches.token_budget is not None:
        return _count(batches.token_budget, "token")
    return _count(batches.samples or 0, "sample")


def _optimizer(optim: Optimizer) -> str:
    warmup = (
        f"{_count(optim.lr_warmup_steps, 'step')} of warm-up"
        if optim.lr_warmup_steps >= 0
        else f"{optim.lr_warmup_steps_ratio:.0%} warm-up"
    )
    return (
        f"AdamW lr {optim.lr:g} {optim.lr_scheduler_type}, {warmup}, betas {optim.betas[0]:g} {optim.betas[1]:g}, "
        f"weight decay {optim.weight_decay:g}, gradient clipped to {optim.clip_grad:g}"
    )


def _generation(plan: Plan) -> list[Row]:
    rollout, skip = plan.rollout, plan.skip
    rows = [
        (
            "rollout",
            f"{rollout.name}, {_count(rollout.replicas, 'replica')}{_degree(rollout)}, up to "
            f"{_count(rollout.max_num_seqs, 'sequence')} each, seed {rollout.seed}, {_sampling(rollout.sampling)}"
            f"{', device graphs' * rollout.graphs}",
        )
    ]
    if rollout.vllm is not None:
        rows.append(("vllm", _vllm(rollout.vllm)))
    if skip.enable:
        steps = ", ".join(str(step) for step in skip.steps) or "none"
        rows.append(("skip rollout", f"{skip.action} at steps {steps} in {skip.dump_dir}"))
    return rows


def _degree(rollout: RolloutPlan) -> str:
    tp = rollout.tensor_model_parallel_size
    return f" of {tp} ranks" if tp > 1 else ""


def _vllm(vllm: VllmPlan) -> str:
    memory = f"{vllm.gpu_memory_utilization:.0%} of the device's memory"
    if vllm.cache_bytes is not None:
        memory = f"{_size(vllm.cache_bytes)} a rank for keys and values"
    parts = [
        vllm.dtype,
        f"sequences up to {_count(vllm.max_model_len, 'token')}",
        "eager" if vllm.enforce_eager else "device graphs",
        memory,
        "gives memory back while training" if vllm.sleeps else "",
        f"engine_kwargs: {', '.join(vllm.engine_kwargs)}" if vllm.engine_kwargs else "",
    ]
    return "; ".join(part for part in parts if part)


def _sampling(sampling: Sampling) -> str:
    if sampling.greedy:
        return "greedy"
    text = f"temperature {sampling.temperature:g}"
    if sampling.top_k != -1:
        text += f", top-k {sampling.top_k}"
    return text if sampling.top_p == 1 else f"{text}, top-p {sampling.top_p:g}"


def _records(plan: Plan) -> list[Row]:
    trainer, custom = plan.trainer, plan.reward
    steps = "" if trainer.total_training_steps is None else f", at most {_count(trainer.total_training_steps, 'step')}"
    before = "before training" if trainer.val_before_train or trainer.val_only else ""
    every = f"every {_count(trainer.test_freq, 'step')}" if trainer.test_freq > 0 else ""
    validation = " and ".join(part for part in (before, every) if part) or "never"
    return [
        (
            "reward",
            f"{custom.custom_name} of {custom.custom_path}" if custom.custom_path else "by data_source",
        ),
        ("length", "validation only" if trainer.val_only else f"{_count(trainer.total_epochs, 'epoch')}{steps}"),
        ("validation", f"{validation}, {_sampling(plan.rollout.val_sampling)}" if validation != "never" else "never"),
        (
            "saves",
            f"{', '.join(trainer.save_contents)} every {_count(trainer.save_freq, 'step')} to {trainer.checkpoint_dir}"
            if trainer.save_freq > 0
            else "never",
        ),
        ("run folder", trainer.run_dir),
        *([("phase records", trainer.record_phases)] if trainer.record_phases != "none" else []),
    ]


def _count(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
