"""What can be known about model folders and data files without reading them in full."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.errors import ConfigError, DataError

_MAGIC = b"PAR1"  # first and last bytes of every parquet file


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model's config.json that a plan depends on; None where the file does not say."""

    heads: int | None
    kv_heads: int | None
    longest: int | None  # tokens of the longest sequence it was made for
    vocab: int | None


def model_shape(key: str, path: str, override_config: dict[str, Any]) -> ModelShape:
    """Read `path`/config.json. ConfigError when there is no such folder, DataError when it holds no model."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}={path} is not a folder; give the folder of a downloaded model, or make a small one "
            "with `corral model tiny OUT`"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise DataError(f"{key}: {folder} has no config.json, so it is not a transformers model folder") from None
    except OSError as error:
        raise DataError(f"{key}: cannot read {folder / 'config.json'} ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{key}: {folder / 'config.json'} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise DataError(f"{key}: {folder / 'config.json'} does not describe a model: it holds no mapping")
    config = {**config, **(config.get("text_config") or {}), **override_config}
    for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "vocab_size"):
        if not isinstance(config.get(name), int | None):
            raise DataError(f"{key}: {name} is {config[name]!r}, not a whole number; look at override_config too")
    heads = config.get("num_attention_heads")
    return ModelShape(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        longest=_longest(config),
        vocab=config.get("vocab_size"),
    )


def _longest(config: dict[str, Any]) -> int | None:
    """max_position_embeddings, stretched by a rope scaling that counts from an original length."""
    longest: int | None = config.get("max_position_embeddings")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if longest is None or original is None or factor is None:
        return longest
    return max(longest, int(original * factor))


def check_data_file(key: str, path: str) -> None:
    """ConfigError when there is no such file, DataError when it is empty, or parquet that is cut short or none."""
    file = Path(path)
    if not file.exists():
        raise ConfigError(
            f"{key}: {file} does not exist; `corral data gsm8k` and `corral data arithmetic` write such files"
        )
    if not file.is_file():
        raise ConfigError(
            f"{key}: {file} is not a file; name the data files one by one: '{key}=[a.parquet, b.parquet]'"
        )
    size = file.stat().st_size
    if size == 0:
        raise DataError(f"{key}: {file} is empty (0 bytes)")
    if file.suffix in (".json", ".jsonl"):
        return
    with file.open("rb") as stream:
        head = stream.read(len(_MAGIC))
        stream.seek(max(0, size - len(_MAGIC)))
        tail = stream.read()
    if head != _MAGIC:
        raise DataError(
            f"{key}: {file} is not a parquet file (it starts with {head!r}); convert it with `corral data gsm8k`"
        )
    if tail != _MAGIC or size < 3 * len(_MAGIC):
        raise DataError(f"{key}: {file} is not a complete parquet file ({size} bytes, no footer); write it again")
