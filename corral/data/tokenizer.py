"""The tokenizer of a model folder."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from corral.config.plan import Model
from corral.errors import DataError


def load_tokenizer(model: Model) -> Any:
    """The folder's tokenizer, with the chat template the prompts need.

    Raises:
        DataError: the folder holds no usable tokenizer, or one without a chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"no tokenizer in {model.tokenizer_path}: {reason}") from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer of the model's kind where the folder holds no tokenizer files.
        raise DataError(f"no tokenizer in {model.tokenizer_path}: it knows no words; add the model's tokenizer files")
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer in {model.tokenizer_path} has no chat template, and prompts are chats; "
            "use an instruct model, or add chat_template.jinja to the folder"
        )
    return tokenizer
