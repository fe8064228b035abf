"""actor_rollout_ref.rollout.*: the engine that generates."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from corral.config.section import Section, key, section

_ACTOR = "actor_rollout_ref.actor"


@dataclass
class ValKwargs(Section):
    temperature: float = key(0.0, "Sampling temperature of validation.")
    top_k: int = key(-1, "Draw from the k likeliest tokens; -1: all.", "tokens")
    top_p: float = key(1.0, "Draw from the smallest set of tokens with this probability.")
    do_sample: bool = key(False, "Draw at random; False: greedy.")
    n: int = key(1, "Samples per validation prompt.", "samples")


@dataclass
class Rollout(Section):
    name: str | None = key(None, "Engine: native, vllm; null: vllm on accelerators where it is installed, else native.")
    fallback: str | None = key(None, "native: run native where the named engine is missing, also on an accelerator.")
    n: int = key(1, "Samples per prompt.", "samples")
    temperature: float = key(1.0, "Sampling temperature; the trainer divides its logits by it too.")
    top_k: int = key(-1, "Draw from the k likeliest tokens; -1: all.", "tokens")
    top_p: float = key(1.0, "Draw from the smallest set of tokens with this probability.")
    do_sample: bool = key(True, "Draw at random; False: greedy.")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling of validation.")
    seed: int = key(42, "Seed of the random stream of every sample.")
    ignore_eos: bool = key(False, "Generate up to the cap even after the end-of-sequence token.")
    max_num_seqs: int = key(256, "Sequences one replica decodes together.", "samples")
    tensor_model_parallel_size: int = key(1, "Devices of one replica; more than 1 needs vllm.", "ranks")
    log_prob_use_dynamic_bsz: bool = key(
        II(f"{_ACTOR}.use_dynamic_bsz"), "Token budget for old log-probs; default: as the actor."
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward for old log-probs; needed when log_prob_use_dynamic_bsz is False.", "samples"
    )
    log_prob_max_token_len_per_gpu: int = key(
        II(f"{_ACTOR}.ppo_max_token_len_per_gpu"), "Token budget for old log-probs; default: as the actor.", "tokens"
    )
    probe_tolerance: float | None = key(
        None, "Largest log-prob gap between trainer and engine after a weight update; null: by compute dtype."
    )
    calculate_log_probs: bool = key(True, "Return the engine's log-probs; they always come.")
    engine_kwargs: dict[str, Any] = key({}, "Options handed to the engine as they are, by engine name.")
    gpu_memory_utilization: float = key(0.5, "vLLM: share of device memory.")
    enable_chunked_prefill: bool = key(True, "vLLM: cut long prefills.")
    enable_prefix_caching: bool = key(True, "vLLM: share the cache of equal prefixes.")
    enforce_eager: bool = key(False, "No compiled or captured decode step: it is launched kernel by kernel.")
    free_cache_engine: bool = key(True, "vLLM: free weights and cache while training.")
    max_num_batched_tokens: int = key(8192, "vLLM: tokens of one engine step.", "tokens")
    max_model_len: int | None = key(None, "vLLM: longest sequence.", "tokens")
    load_format: str = key("dummy", "vLLM: where the first weights come from.")
    dtype: str | None = key(None, "vLLM: type of its weights; null: the actor's compute dtype.")
