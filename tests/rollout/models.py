"""Small random models, built in memory, and plans for them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from corral.config.plan import RolloutPlan, Sampling
from corral.engine.attention import ATTENTION
from corral.engine.norm import use_full_precision_norms

VOCABULARY = 48
SAMPLED = Sampling(temperature=1.0, top_k=-1, top_p=1.0, do_sample=True, n=1)
GREEDY = Sampling(temperature=0.0, top_k=-1, top_p=1.0, do_sample=False, n=1)

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Large enough that the next token depends on everything before it, small enough that sampling matters.
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

_FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}


def build(
    family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, attention: str = ATTENTION, **changes: object
) -> nn.Module:
    """A model of the family (a key of _FAMILIES) whose weights depend on the seed alone."""
    kind, config = _FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**{**_SHAPE, **changes}, attn_implementation=attention)).to(dtype)
    if dtype == torch.float64:
        use_full_precision_norms(model)
    return model.eval()


def rollout_plan(
    *,
    response_length: int = 12,
    prompt_length: int = 32,
    max_num_seqs: int = 64,
    ignore_eos: bool = False,
    seed: int = 7,
    sampling: Sampling = SAMPLED,
) -> RolloutPlan:
    return RolloutPlan(
        name="native",
        requested="native",
        replicas=1,
        tensor_model_parallel_size=1,
        prompt_length=prompt_length,
        response_length=response_length,
        max_num_seqs=max_num_seqs,
        ignore_eos=ignore_eos,
        seed=seed,
        sampling=sampling,
        val_sampling=GREEDY,
        probe_tolerance=1e-3,
    )
