"""data.*: the prompts."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corral.config.section import Section, key


@dataclass
class Data(Section):
    train_files: Any = key("~/data/rlhf/gsm8k/train.parquet", "Parquet file or list of files to train on.")
    val_files: Any = key("~/data/rlhf/gsm8k/test.parquet", "Parquet file or list of files to validate on.")
    prompt_key: str = key("prompt", "Column that holds the chat messages of the prompt.")
    train_batch_size: int = key(1024, "Prompts per iteration; samples are this × rollout.n.", "prompts")
    max_prompt_length: int = key(512, "Longest prompt after chat templating.", "tokens")
    max_response_length: int = key(512, "Longest response; generation stops there.", "tokens")
    truncation: str = key(
        "error", "What happens to a longer prompt: error, left (keep the end), right (keep the start), middle."
    )
    filter_overlong_prompts: bool = key(False, "Drop rows whose prompt is longer instead of applying data.truncation.")
    shuffle: bool = key(True, "Visit the training rows in a new random order every epoch.")
    seed: int = key(42, "Seed of that order.")
    train_max_samples: int = key(-1, "Use only the first rows of the training set; -1: all.", "rows")
    val_max_samples: int = key(-1, "Use only the first rows of the validation set; -1: all.", "rows")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments of the tokenizer's chat template.")
