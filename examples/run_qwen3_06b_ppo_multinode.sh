#!/usr/bin/env bash
# PPO on GSM8K with Qwen3-0.6B, two nodes of four devices. Override by environment; extra arguments are appended:
#   MODEL_PATH=/models/mine ./run_qwen3_06b_ppo_multinode.sh trainer.total_training_steps=10
set -euo pipefail

MODEL_ID="${MODEL_ID:-Qwen/Qwen3-0.6B}"
MODEL_PATH="${MODEL_PATH:-${HOME}/.cache/models/${MODEL_ID}}"
DATA_DIR="${DATA_DIR:-${HOME}/data/gsm8k}"

# Record and replay of generations: with SKIP_ENABLE=True the listed steps are generated once and read back afterwards.
SKIP_ENABLE="${SKIP_ENABLE:-False}"
SKIP_DUMP_DIR="${SKIP_DUMP_DIR:-${HOME}/.corral/rollout_dump}"
SKIP_STEPS="${SKIP_STEPS:-[1]}"
SKIP_ACTION="${SKIP_ACTION:-cache}"

exec python3 -m corral.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="${DATA_DIR}/train.parquet" \
    data.val_files="${DATA_DIR}/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=512 \
    data.max_response_length=128 \
    data.shuffle=False \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.use_torch_compile=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    actor_rollout_ref.rollout.enforce_eager=False \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode="FULL_AND_PIECEWISE" \
    critic.optim.lr=1e-5 \
    critic.model.use_remove_padding=True \
    critic.model.path="${MODEL_PATH}" \
    critic.model.enable_gradient_checkpointing=True \
    critic.ppo_micro_batch_size_per_gpu=1 \
    critic.ulysses_sequence_parallel_size=2 \
    critic.fsdp.param_offload=True \
    critic.fsdp.optimizer_offload=True \
    critic.use_dynamic_bsz=True \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.project_name='verl_ppo_example_gsm8k_qwen3' \
    trainer.experiment_name='qwen3_06b_fsdp_multinode_2x4' \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=2 \
    trainer.save_freq=-1 \
    trainer.test_freq=-1 \
    trainer.total_epochs=1 \
    trainer.total_training_steps=1 \
    skip.rollout.enable="${SKIP_ENABLE}" \
    skip.rollout.dump_dir="${SKIP_DUMP_DIR}" \
    skip.rollout.steps="${SKIP_STEPS}" \
    skip.rollout.action="${SKIP_ACTION}" \
    "$@"
