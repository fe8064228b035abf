"""Checks of a derived plan against the model folders and data files, and what the user should know about it."""

from __future__ import annotations

from corral.config.files import ModelShape, check_data_file, model_shape
from corral.config.plan import EnginePlan, MicroBatches, Plan, VllmPlan
from corral.errors import ConfigError

_SP_KEY = {
    "actor": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "critic": "critic.ulysses_sequence_parallel_size",
    "ref": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
}
_ROLLOUT = "actor_rollout_ref.rollout"
_TP_KEY = f"{_ROLLOUT}.tensor_model_parallel_size"
_PATH_KEY = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


def check_files(plan: Plan, given: frozenset[str]) -> None:
    """Raise ConfigError or DataError unless models and data files are there and fit the plan.

    `given`: the keys the user set; default validation files that nothing will read may be missing.
    """
    actor = model_shape(_PATH_KEY["actor"], plan.actor.model.path, plan.actor.model.override_config)
    _check_model(plan, plan.actor, actor)
    if plan.ref:
        _check_heads(_SP_KEY["ref"], plan.ref.sp, plan.ref.model.path, actor)
    if plan.rollout.vllm is not None:
        _check_vllm(plan, plan.rollout.vllm, actor)
    if plan.critic:
        critic = model_shape(_PATH_KEY["critic"], plan.critic.model.path, plan.critic.model.override_config)
        _check_model(plan, plan.critic, critic)
        if actor.vocab and critic.vocab and critic.vocab < actor.vocab:
            raise ConfigError(
                f"critic.model.path={plan.critic.model.path} knows {critic.vocab} tokens and the actor {actor.vocab}: "
                "they need the same tokenizer"
            )
    for file in plan.data.train_files:
        check_data_file("data.train_files", file)
    if validates(plan) or "data.val_files" in given:
        for file in plan.data.val_files:
            check_data_file("data.val_files", file)
    if not plan.data.train_files:
        raise ConfigError("data.train_files is an empty list; name at least one parquet file")


def validates(plan: Plan) -> bool:
    """Whether this run reads the validation files at all."""
    return plan.trainer.val_before_train or plan.trainer.val_only or plan.trainer.test_freq > 0


def notices(plan: Plan) -> list[str]:
    """What is allowed but worth knowing before the run starts."""
    out = []
    longest = plan.data.max_prompt_length + plan.data.max_response_length
    engines = [engine for engine in (plan.actor, plan.critic, plan.ref) if engine]
    for engine in engines:
        budget = _smallest_budget(engine.train, engine.infer)
        if budget is not None and longest > budget:
            out.append(
                f"{engine.role}: the longest sequence ({longest} tokens) exceeds the token budget of {budget}; such a "
                "sequence gets a micro-batch of its own"
            )
    if plan.topology.device == "cpu" and any(e.param_offload or e.optimizer_offload for e in engines):
        out.append(
            "offload: on cpu parameters and optimizer state are in host memory already, so offloading moves nothing"
        )
    slow = [e.role for e in engines if e.compute_dtype not in ("bfloat16", "float16") and e.attention != "sdpa"]
    if plan.topology.device == "cuda" and slow:
        out.append(
            f"{', '.join(slow)}: the variable-length attention kernels of cuda are in half precision only; in another "
            "dtype every segment is a call of its own, which is slow"
        )
    if plan.topology.device == "cuda":
        out.append("cuda: this path has been tested without a device only; docs/devices.md says how")
    if plan.topology.device == "npu":
        out.append("npu: this path has been tested without a device only; docs/ascend.md says how")
    for trained, update in ((plan.actor, plan.actor_update), (plan.critic, plan.critic_update)):
        samples = update.mini_batch_prompts * plan.rollout.sampling.n if update else 0
        if trained and samples < trained.dp:
            out.append(
                f"{trained.role}: a mini-batch of {samples} samples over DP {trained.dp} leaves ranks with no-op "
                "samples only"
            )
    if plan.algorithm.adv_estimator == "remax":
        out.append(
            f"remax: {plan.data.train_batch_size} greedy responses are generated in each iteration beside the "
            f"{plan.samples_per_step} samples, as baselines"
        )
    if plan.skip.enable and not plan.skip.steps:
        out.append("skip.rollout.enable=True without skip.rollout.steps records and replays nothing")
    return out


def _smallest_budget(*batches: MicroBatches | None) -> int | None:
    return min((b.token_budget for b in batches if b and b.token_budget is not None), default=None)


def _check_model(plan: Plan, engine: EnginePlan, shape: ModelShape) -> None:
    _check_heads(_SP_KEY[engine.role], engine.sp, engine.model.path, shape)
    longest = plan.data.max_prompt_length + plan.data.max_response_length
    if shape.longest is not None and longest > shape.longest:
        raise ConfigError(
            f"data.max_prompt_length={plan.data.max_prompt_length} + data.max_response_length="
            f"{plan.data.max_response_length} = {longest} tokens exceed the {shape.longest} positions of the "
            f"{engine.role} model {engine.model.path}; lower one of them"
        )


def _check_heads(key: str, degree: int, model: str, shape: ModelShape) -> None:
    """Whether the heads can be split over so many ranks, as Ulysses and vllm's tensor parallelism both do."""
    if shape.heads is None or shape.kv_heads is None or degree == 1:
        return
    if shape.heads % degree:
        raise ConfigError(f"{key}={degree} does not divide the {shape.heads} attention heads of {model}")
    if shape.kv_heads % degree and degree % shape.kv_heads:
        raise ConfigError(
            f"{key}={degree} and the {shape.kv_heads} key/value heads of {model}: one has to divide the other"
        )


def _check_vllm(plan: Plan, vllm: VllmPlan, shape: ModelShape) -> None:
    _check_heads(_TP_KEY, plan.rollout.tensor_model_parallel_size, plan.actor.model.path, shape)
    if shape.longest is not None and vllm.max_model_len > shape.longest:
        longest = plan.data.max_prompt_length + plan.data.max_response_length
        raise ConfigError(
            f"{_ROLLOUT}.name=vllm is to hold {vllm.max_model_len} tokens, and {plan.actor.model.path} has "
            f"{shape.longest} positions; it needs one more than data.max_prompt_length + data.max_response_length = "
            f"{longest} and {_ROLLOUT}.max_model_len: lower what exceeds them"
        )
