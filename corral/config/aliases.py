"""Other spellings of a key, and familiar keys this version does not have."""

from __future__ import annotations

_ARR = "actor_rollout_ref"

ALIASES: dict[str, tuple[str, ...]] = {
    f"{_ARR}.actor.fsdp_config.ulysses_sequence_parallel_size": (f"{_ARR}.actor.ulysses_sequence_parallel_size",),
    f"{_ARR}.ref.fsdp_config.ulysses_sequence_parallel_size": (f"{_ARR}.ref.ulysses_sequence_parallel_size",),
    "critic.fsdp.ulysses_sequence_parallel_size": ("critic.ulysses_sequence_parallel_size",),
    f"{_ARR}.actor.use_torch_compile": (f"{_ARR}.actor.fsdp_config.use_torch_compile",),
    f"{_ARR}.ref.use_torch_compile": (f"{_ARR}.ref.fsdp_config.use_torch_compile",),
    f"{_ARR}.actor.grad_clip": (f"{_ARR}.actor.optim.clip_grad",),
    "critic.grad_clip": ("critic.optim.clip_grad",),
    f"{_ARR}.actor.clip_ratio": (f"{_ARR}.actor.clip_ratio_low", f"{_ARR}.actor.clip_ratio_high"),
    f"{_ARR}.rollout.prompt_length": ("data.max_prompt_length",),
    f"{_ARR}.rollout.response_length": ("data.max_response_length",),
    "critic.forward_micro_batch_size_per_gpu": ("critic.ppo_infer_micro_batch_size_per_gpu",),
    "critic.forward_max_token_len_per_gpu": ("critic.ppo_infer_max_token_len_per_gpu",),
    f"{_ARR}.actor.fsdp_config.full_determinism": ("trainer.full_determinism",),
    f"{_ARR}.rollout.full_determinism": ("trainer.full_determinism",),
    "critic.tokenizer_path": ("critic.model.tokenizer_path",),
}
"""Spelling → the keys it sets."""

BLOCK_ALIASES: dict[str, str] = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.": "reward.custom_reward_function.",
}
"""Prefix of a moved block → where its keys live now."""

REPLACED: dict[str, str] = {
    f"{_ARR}.actor.ppo_micro_batch_size": f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    f"{_ARR}.rollout.log_prob_micro_batch_size": f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_ARR}.ref.log_prob_micro_batch_size": f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
}
"""Global micro-batch sizes, which changed meaning with the world size → the per-device key to use instead."""

NOT_YET: tuple[str, ...] = (
    "algorithm.filter_groups.max_inflight_gen_batches",
    "data.gen_batch_size",
    "data.val_batch_size",
    "data.dataloader_num_workers",
    "data.validation_shuffle",
    "data.filter_overlong_prompts_workers",
    "data.return_raw_chat",
    "data.reward_fn_key",
    "data.custom_cls",
    "data.image_key",
    "data.tool_config_path",
    f"{_ARR}.actor.checkpoint.load_contents",
    f"{_ARR}.actor.checkpoint.async_save",
    f"{_ARR}.actor.entropy_from_logits_with_chunking",
    f"{_ARR}.actor.entropy_checkpointing",
    f"{_ARR}.actor.fsdp_config.forward_prefetch",
    f"{_ARR}.actor.fsdp_config.offload_policy",
    f"{_ARR}.actor.fsdp_config.wrap_policy",
    f"{_ARR}.actor.optim.optimizer_impl",
    f"{_ARR}.hybrid_engine",
    f"{_ARR}.model.external_lib",
    f"{_ARR}.model.use_shm",
    f"{_ARR}.model.lora_rank",
    f"{_ARR}.model.lora_alpha",
    f"{_ARR}.model.target_modules",
    f"{_ARR}.model.use_liger",
    f"{_ARR}.model.use_fused_kernels",
    f"{_ARR}.model.enable_activation_offload",
    f"{_ARR}.model.custom_chat_template",
    f"{_ARR}.rollout.agent",
    f"{_ARR}.rollout.multi_turn",
    f"{_ARR}.rollout.checkpoint_engine",
    f"{_ARR}.rollout.mode",
    "critic.checkpoint",
    "reward.reward_model",
    "reward.sandbox_fusion",
    "reward_model",
    "trainer.validation_data_dir",
    "trainer.log_val_generations",
    "trainer.default_hdfs_dir",
    "trainer.del_local_ckpt_after_load",
    "trainer.esi_redundant_time",
    "trainer.ray_wait_register_center_timeout",
    "trainer.use_v1",
    "trainer.v1",
    "skip.rollout_tq",
    "skip.async_rollout",
    "global_profiler",
    "ray_kwargs",
)
"""Familiar keys and blocks that this version does not have: said so, instead of guessing a misspelling."""


def canonical(key: str) -> tuple[str, ...]:
    """The schema keys that `key` sets: itself, unless it is another spelling."""
    for old, new in BLOCK_ALIASES.items():
        if key.startswith(old):
            key = new + key.removeprefix(old)
    return ALIASES.get(key, (key,))
