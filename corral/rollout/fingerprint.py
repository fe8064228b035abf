"""What a recorded generation depends on, as digests and plain values that can be compared and explained."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from corral.config.plan import Plan
from corral.errors import DataError
from corral.rollout.base import Request

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx"}
_TOKENIZER = (
    "tokenizer",
    "vocab",
    "merges",
    "added_tokens",
    "special_tokens",
    "chat_template",
    "spiece",
    "sentencepiece",
)
_TOKENIZER_SUFFIXES = {".model", ".tiktoken", ".jinja"}
_READ = {".json", ".txt", ".py", ".yaml"}
_BLOCK = 64 << 10
_BLOCKS = 256


@dataclass(frozen=True)
class Fingerprint:
    """What every step of a run has in common. Equal: generations of the same rows may stand in for each other.

    model, tokenizer: digests of the folders (not of the live weights). data: digest of the training files. sampling:
    how tokens are drawn, with seed, ignore_eos and, unless it is native, the engine, whose random streams are its own.
    sizes: limits of prompts and responses, samples of a step. max_num_seqs and the world are absent because no sample
    depends on them.
    """

    model: str
    tokenizer: str
    data: str
    sampling: dict[str, Any]
    sizes: dict[str, int]

    def differences(self, recorded: Fingerprint) -> list[str]:
        """In words, each item in which a recorded fingerprint differs from this one."""
        found = []
        for name in ("model", "tokenizer", "data"):
            here, there = getattr(self, name), getattr(recorded, name)
            if here != there:
                found.append(f"{name} is another ({str(there)[:12]} recorded, {here[:12]} expected)")
        for name in ("sampling", "sizes"):
            here, there = getattr(self, name), getattr(recorded, name)
            for key in sorted(here.keys() | there.keys()):
                if here.get(key) != there.get(key):
                    found.append(f"{name}.{key} {there.get(key)!r} recorded, {here.get(key)!r} expected")
        return found


def fingerprint(plan: Plan) -> Fingerprint:
    """The fingerprint of a run; reads the model folder, the tokenizer and the training files. Compute it once."""
    model, rollout = plan.actor.model, plan.rollout
    overrides = json.dumps(model.override_config, sort_keys=True) if model.override_config else ""
    return Fingerprint(
        model=folder_digest(model.path) + overrides,
        tokenizer=tokenizer_digest(model.tokenizer_path),
        data=files_digest(plan.data.train_files),
        sampling={
            **asdict(rollout.sampling),
            "seed": rollout.seed,
            "ignore_eos": rollout.ignore_eos,
            **({"engine": f"vllm, {rollout.vllm.dtype}"} if rollout.vllm is not None else {}),
        },
        sizes={
            "prompt_length": rollout.prompt_length,
            "response_length": rollout.response_length,
            "samples": plan.samples_per_step,
        },
    )


def rows_digest(requests: Iterable[Request]) -> str:
    """Hex digest of the samples in order: data row, sample index, prompt ids."""
    digest = hashlib.blake2b(digest_size=20)
    for request in requests:
        ids = request.prompt_ids
        digest.update(struct.pack(f"<{len(ids) + 3}q", request.row, request.sample_index, len(ids), *ids))
    return digest.hexdigest()


def files_digest(paths: Iterable[str | Path]) -> str:
    """Hex digest of the content of files in order; where they lie and what they are called does not count."""
    digest = hashlib.blake2b(digest_size=20)
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def folder_digest(path: str | Path) -> str:
    """Hex digest of a model folder, cheap for a large model.

    Read in full: configuration, tokenizer, templates and code files. Weight files by name, size, safetensors header
    (names, types, shapes, offsets) and content, of which files above 16 MiB are read in 256 evenly spaced blocks of 64
    KiB, the first and the last included: training touches every block, but a hand edit of a few weights between the
    blocks goes unseen. Sub-folders, hidden files and anything else (README, images) are left out.
    Raises DataError where there is no folder or nothing in it that counts.
    """
    return _digest(path, lambda file: file.suffix in _READ | _WEIGHTS or _is_tokenizer(file), "model")


def tokenizer_digest(path: str | Path) -> str:
    """Hex digest of the tokenizer files of a folder, chat template included, in full. Raises DataError likewise."""
    return _digest(path, _is_tokenizer, "tokenizer")


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in _TOKENIZER_SUFFIXES


class _Wanted(Protocol):
    def __call__(self, file: Path) -> bool: ...


def _digest(path: str | Path, wanted: _Wanted, kind: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{kind} folder {folder} does not exist")
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith(".") and wanted(f))
    if not files:
        raise DataError(f"{kind} folder {folder} holds no {kind} files")
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        if file.suffix in _WEIGHTS:
            _sample_weights(file, digest)
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _sample_weights(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _BLOCK * _BLOCKS:
            digest.update(file.read())
            return
        if path.suffix == ".safetensors":
            (header,) = struct.unpack("<Q", file.read(8))
            digest.update(file.read(min(header, size)))
        for i in range(_BLOCKS):
            file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
