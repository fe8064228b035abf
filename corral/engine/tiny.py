"""A causal language model of a million parameters with its own tokenizer, written in seconds and the same every time.

It exists so that a whole run (templating, generation, training, checkpoints) can be tried on a laptop. The weights are
random but for one thing: the end token is made likely enough that responses end at many different lengths, as they do
with a real model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import atomic
from corral.engine.tiny_corpus import CORPUS
from corral.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("qwen3", "llama")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECIPE_FILE = "corral_recipe.json"
"""Written last into the folder: what the model was made from. A folder with another recipe, or none, is not ours."""


def write_tiny_model(
    out: Path,
    *,
    seed: int = 0,
    architecture: str = "qwen3",
    vocab_size: int = 768,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    mean_length: int = 48,
    force: bool = False,
) -> bool:
    """Write a transformers folder (fp32 safetensors, tokenizer, chat template) to `out`, complete or not at all.

    mean_length: about how many tokens a response has under plain sampling (temperature 1, no cap).
    Returns False when `out` already holds the model of these very arguments, which is then left alone.
    Raises DataError when the architecture is unknown, or when `out` holds anything else and `force` is not set.
    """
    if architecture not in ARCHITECTURES:
        raise DataError(f"architecture {architecture!r} is unknown; choose one of {', '.join(ARCHITECTURES)}")
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    }
    recipe = {
        "architecture": architecture,
        "seed": seed,
        "vocab_size": vocab_size,
        "mean_length": mean_length,
        "sizes": sizes,
        "corpus": hashlib.sha256("\n".join(CORPUS).encode()).hexdigest(),
    }
    if _is_made_by(out, recipe):
        return False
    if out.exists() and not force and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not this model; choose another folder, or replace it with --force")
    tokenizer = _train_tokenizer(vocab_size)
    model = _random_model(architecture, sizes, tokenizer, seed=seed, mean_length=mean_length)
    with atomic.new_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / RECIPE_FILE).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")
    return True


def _is_made_by(out: Path, recipe: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((out / RECIPE_FILE).read_text()) == recipe)
    except (OSError, ValueError):
        return False


def _train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every digit is a token of its own, so numbers are read and written digit by digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _random_model(
    architecture: str, sizes: dict[str, Any], tokenizer: PreTrainedTokenizerFast, *, seed: int, mean_length: int
) -> PreTrainedModel:
    """fp32, untied head, the same for the same arguments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[architecture]
    config = config_class(
        **sizes,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _make_ends_likely(model, tokenizer.eos_token_id, probability=1 / mean_length)
    return model


def _make_ends_likely(model: PreTrainedModel, end: int, *, probability: float) -> None:
    """Give the end token about `probability` after random text.

    A head without a bias cannot favour a token everywhere, and scaling the token's row of the head makes it as often
    impossible as likely. So every embedding gets the same value in one coordinate, and the end token's row reads that
    coordinate, with the weight that meets the probability. Two decimals of it are kept: the same on every machine.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.2
        row = model.get_output_embeddings().weight[end]
        row[0] = 0.0
        text = torch.randint(3, model.config.vocab_size, (16, 64))
        hidden = model.base_model(input_ids=text, use_cache=False).last_hidden_state
        others = model.get_output_embeddings()(hidden)
        others[..., end] = -torch.inf
        others = others.logsumexp(-1)
        low, high = 0.0, 8.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            logit = hidden @ row + middle * hidden[..., 0]
            if (logit - torch.logaddexp(logit, others)).exp().mean() < probability:
                low = middle
            else:
                high = middle
        row[0] = round(high, 2)
