"""Small models, plans and batches for engine tests, and the oracle: eager attention, one sample at a time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForTokenClassification
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForTokenClassification

from corral.algorithms.aggregate import Denominators
from corral.batch import Batch
from corral.config.plan import ActorUpdate, CriticUpdate, EnginePlan, MicroBatches, Model, Optimizer
from corral.engine.losses import ActorObjective, CriticObjective, Objective

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide, so that attention is far from uniform and errors in it show
}
ARCHITECTURES = ("qwen3", "llama", "qwen3-tied")


def write_model(folder: Path, architecture: str) -> Path:
    """A causal LM with random weights, the same every time."""
    torch.manual_seed(11)
    if architecture == "llama":
        config = LlamaConfig(**_SIZES, tie_word_embeddings=False)
    else:
        config = Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=architecture == "qwen3-tied")
    path = folder / architecture
    model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path


def engine_plan(path: Path, role: str = "actor", **changes: Any) -> EnginePlan:
    """A plan in float32, SP 1, DP 1, rows of at most 48 tokens, AdamW at 1e-3. `dtype` sets both dtypes."""
    dtype = changes.pop("dtype", "float32")
    checkpointing = changes.pop("checkpointing", False)
    override = changes.pop("override_config", {})
    fused = changes.pop("fused", False)
    limits = changes.pop("limits", MicroBatches(48, None))
    plan = EnginePlan(
        role=role,
        model=Model(str(path), str(path), False, override, checkpointing, fused),
        sp=1,
        dp=1,
        master_dtype=dtype,
        compute_dtype=dtype,
        param_offload=False,
        optimizer_offload=False,
        reshard_after_forward=True,
        use_torch_compile=False,
        seed=5,
        infer=limits,
        train=limits,
        optim=optimizer(),
    )
    return replace(plan, **changes)


def optimizer(**changes: Any) -> Optimizer:
    plan = Optimizer(
        lr=1e-3,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        clip_grad=1.0,
        lr_scheduler_type="constant",
        lr_warmup_steps=-1,
        lr_warmup_steps_ratio=0.0,
        min_lr_ratio=0.0,
        num_cycles=0.5,
    )
    return replace(plan, **changes)


def random_batch(samples: int = 13, seed: int = 3, dtype: torch.dtype = torch.float32) -> Batch:
    """Prompts of 1 to 14 and responses of 0 to 20 tokens (the first one empty), with all that objectives read.

    A tenth of the response tokens is masked, as tool output would be.
    """
    pick = random.Random(seed)
    prompts = [[pick.randrange(3, VOCAB) for _ in range(pick.randint(1, 14))] for _ in range(samples)]
    responses = [[pick.randrange(3, VOCAB) for _ in range(pick.randint(0, 20) if i else 0)] for i in range(samples)]
    names = range(samples)
    batch = Batch.from_samples(
        prompts, responses, row=names, sample_index=[0] * samples, group=names, finish=["stop"] * samples
    )
    tokens = batch.response_ids.numel()
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return (scale * torch.randn(tokens, generator=generator, dtype=torch.float64)).to(dtype)

    return batch.with_fields(
        response_mask=torch.rand(tokens, generator=generator) > 0.1,
        old_log_probs=noise(0.3) - 4.6,
        ref_log_probs=noise(0.3) - 4.6,
        advantages=noise(1.0),
        values=noise(0.2),
        returns=noise(1.0),
    )


def objective(role: str, batch: Batch) -> Objective:
    """PPO's objectives with every term switched on, for `batch` as the whole mini-batch."""
    denominators = Denominators(tokens=int(batch.response_mask.sum()), samples=len(batch))
    if role == "critic":
        return CriticObjective(CriticUpdate(8, 1, False, 1, 0.5, "token-mean", None, 1), denominators)
    update = ActorUpdate(
        mini_batch_prompts=8,
        epochs=1,
        shuffle=False,
        shuffle_seed=1,
        loss_mode="vanilla",
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="seq-mean-token-mean",
        loss_scale_factor=None,
        entropy_coeff=0.01,
        calculate_entropy=True,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        optimizer_steps=1,
    )
    return ActorObjective(update, denominators)


@torch.no_grad()
def eager_distributions(path: Path, batch: Batch, temperature: float, dtype: torch.dtype) -> Tensor:
    """Log-probs [R, V] before each response token, one sample at a time, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    distributions = []
    for i in range(len(batch)):
        prompt, response = batch.prompt(i), batch.response(i)
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1 or None]
        distributions.append(torch.log_softmax(logits[: len(response)] / temperature, dim=-1))
    return torch.cat(distributions)


def eager_log_probs(path: Path, batch: Batch, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R] of a folder's causal LM."""
    distributions = eager_distributions(path, batch, temperature, dtype)
    log_probs = distributions.gather(1, batch.response_ids[:, None])[:, 0]
    return log_probs, -(distributions.exp() * distributions).sum(-1)


@torch.no_grad()
def eager_values(engine_folder: Path, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Values [R] of a critic saved at `engine_folder`, one sample at a time, by transformers alone."""
    kind = LlamaForTokenClassification if "llama" in engine_folder.name else Qwen3ForTokenClassification
    model = kind.from_pretrained(engine_folder, dtype=dtype, attn_implementation="eager").eval()
    values = []
    for i in range(len(batch)):
        prompt, response = batch.prompt(i), batch.response(i)
        output = model(input_ids=torch.cat([prompt, response])[None]).logits[0, :, 0]
        values.append(output[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    return torch.cat(values)
