"""Which tokens end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corral.errors import DataError


def eos_ids(source: str | Path | Any, tokenizer: Any) -> tuple[int, ...]:
    """Every end-of-sequence id, ascending: those of the generation config and that of the tokenizer.

    source: a model folder (its generation_config.json, else its config.json) or an object with `eos_token_id` (one id,
    several or None), such as transformers' GenerationConfig. tokenizer: an object with `eos_token_id`. Chat models
    often name several ids in the one place and a single one in the other; a response may end with any of them.
    Raises DataError when a file cannot be read.
    """
    found = _declared(Path(source)) if isinstance(source, str | Path) else source.eos_token_id
    ids = set(found) if isinstance(found, list | tuple) else {found}
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))


def _declared(folder: Path) -> int | list[int] | None:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                found: int | list[int] | None = json.loads((folder / name).read_text(encoding="utf-8"))["eos_token_id"]
            except (ValueError, TypeError) as error:
                raise DataError(f"{folder / name} is not a JSON object: {error}; restore the model folder") from error
            except KeyError:
                continue
            if found is not None:
                return found
    return None
