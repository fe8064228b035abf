"""safetensors files written and read one tensor at a time, so that a checkpoint never has to fit in memory twice.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON header with
type, shape and place of each tensor; the tensors. Reading is the library's, which maps the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corral.errors import DataError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, in the order of `layout`, whose entries give name, type and whole shape. OSError passes."""
    header: dict[str, Any] = {}
    end = 0
    for name, like in layout.items():
        start, end = end, end + math.prod(like.shape) * like.element_size()
        header[name] = {"dtype": _NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def tensors_of(path: Path) -> Iterator[Any]:
    """The file's tensors, read when asked for, as safetensors.safe_open gives them. DataError: missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole safetensors file ({reason}); resume from another checkpoint") from error


def described(dtype: str, shape: Iterable[int]) -> str:
    """A tensor in words: F32 [2, 3]."""
    return f"{dtype} {list(shape)}"


def describe(tensor: Tensor) -> str:
    """A live tensor in the same words; a sharded one is described whole."""
    return described(_NAMES[tensor.dtype], tensor.shape)
