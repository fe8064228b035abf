"""Record and replay of whole-batch generations (skip.rollout): dumps that are whole, verified and free of pickle.

A dump is the folder {dump_dir}/{step} with `rollout.safetensors` (tokens, log-probs, masks, finish reasons, data rows)
and `meta.json` (format, step, fingerprint, size and SHA-256 of the tensors). Rewards are never in it: a replayed step
computes them anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from corral import atomic
from corral.batch import Batch
from corral.config.plan import SkipPlan
from corral.errors import InfraError
from corral.rollout.base import Request
from corral.rollout.fingerprint import Fingerprint, rows_digest

FORMAT = 1
TENSORS = "rollout.safetensors"
META = "meta.json"

_FIELDS = (
    "prompt_ids",
    "prompt_offsets",
    "response_ids",
    "response_offsets",
    "response_mask",
    "row",
    "sample_index",
    "group",
    "finish",
)
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DumpMismatch(Exception):
    """A dump that must not be used. `items`: every difference found, or why it cannot be read."""

    def __init__(self, path: Path, items: list[str]) -> None:
        super().__init__(f"the rollout dump {path} is not used: {'; '.join(items)}")
        self.path = path
        self.items = tuple(items)


class Replay:
    """The recordings of one experiment, under skip.dump_dir."""

    def __init__(self, skip: SkipPlan) -> None:
        self._skip = skip
        self._folder = Path(skip.dump_dir)

    def applies(self, step: int) -> bool:
        """Whether the generation of this training step is recorded and replayed."""
        return self._skip.enable and step in self._skip.steps

    def find(self, step: int) -> Path | None:
        """The dump to try for a step, or None. Looks at names alone; `load` decides whether it may be used.

        cache: this step's. repeat: this step's, else that of the largest step below, else of the smallest above.
        """
        steps = _recorded_steps(self._folder)
        if step in steps:
            return self._folder / str(step)
        if self._skip.action == "cache" or not steps:
            return None
        below = [s for s in steps if s < step]
        return self._folder / str(max(below) if below else min(steps))

    def load(self, path: Path, expected: Fingerprint, *, step: int, requests: Sequence[Request] | None) -> Batch:
        """The recorded samples, without rewards. Raises DumpMismatch that lists every difference; nothing is half used.

        requests: what the step would generate, in batch order; a dump of this step must hold exactly these data rows
        and prompts. A dump of another step (action repeat) holds other prompts by nature: those are not compared, and
        the caller takes rows and prompts from the batch, to score them against the ground truth they belong to. The
        same holds for every dump when the step's requests are not known before it has run (None).
        """
        try:
            meta = json.loads((path / META).read_bytes())
            payload = (path / TENSORS).read_bytes()
        except OSError as error:
            raise DumpMismatch(path, [f"it cannot be read ({error.strerror})"]) from error
        except ValueError as error:
            raise DumpMismatch(path, [f"{META} is torn or damaged"]) from error
        differences = _differences(meta, path, payload, expected)
        if (
            requests is not None
            and path.name == str(step)
            and not differences
            and meta["rows"] != rows_digest(requests)
        ):
            differences.append("data rows or prompts of the step are others")
        if differences:
            raise DumpMismatch(path, differences)
        tensors = parse_tensors(payload)
        return Batch(is_padding=torch.zeros(tensors["row"].numel(), dtype=torch.bool), **tensors)

    def store(self, step: int, batch: Batch, fingerprint: Fingerprint) -> Path:
        """Write the dump of one step, in place of any earlier one, and return its folder.

        Written beside its final place, flushed to disk and renamed: a dump is whole or absent, also after a kill or a
        full disk. Raises InfraError when it cannot be written, with nothing left behind.
        """
        payload = serialise_tensors(_recorded_tensors(batch))
        meta = {
            "format": FORMAT,
            "step": step,
            "fingerprint": asdict(fingerprint),
            "rows": rows_digest(_requests(batch)),
            "tensors": {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()},
        }
        text = json.dumps(meta, indent=1).encode()
        target = self._folder / str(step)
        with _reported(target, len(payload) + len(text)), atomic.new_folder(target) as folder:
            (folder / TENSORS).write_bytes(payload)
            (folder / META).write_bytes(text)
        return target


def _recorded_steps(folder: Path) -> set[int]:
    if not folder.is_dir():
        return set()
    return {
        int(entry.name)
        for entry in folder.iterdir()
        if entry.name.isdecimal() and (entry / META).is_file() and (entry / TENSORS).is_file()
    }


def _differences(meta: Any, path: Path, payload: bytes, expected: Fingerprint) -> list[str]:
    """What is wrong with a dump, in words; empty when it is whole and of the same run."""
    try:
        if meta["format"] != FORMAT:
            return [f"format {meta['format']!r} recorded, {FORMAT} expected"]
        recorded = Fingerprint(**meta["fingerprint"])
        step, _ = meta["step"], meta["rows"]
        size, checksum = meta["tensors"]["bytes"], meta["tensors"]["sha256"]
        found = expected.differences(recorded)
    except (KeyError, TypeError, AttributeError):
        return [f"{META} is not that of a rollout dump"]
    if str(step) != path.name:
        found.append(f"it was recorded at step {step} and lies under {path.name}")
    if len(payload) != size:
        found.append(f"{TENSORS} is torn ({len(payload)} bytes of {size})")
    elif hashlib.sha256(payload).hexdigest() != checksum:
        found.append(f"{TENSORS} is damaged (its checksum does not match)")
    return found


def _recorded_tensors(batch: Batch) -> dict[str, Tensor]:
    assert not bool(batch.is_padding.any()), "no-op samples belong to a split, not to a recording"
    tensors = {name: getattr(batch, name).contiguous() for name in _FIELDS}
    if batch.rollout_log_probs is not None:
        tensors["rollout_log_probs"] = batch.rollout_log_probs.contiguous()
    return tensors


def _requests(batch: Batch) -> Iterator[Request]:
    for i, (row, index) in enumerate(zip(batch.row.tolist(), batch.sample_index.tolist(), strict=True)):
        yield Request(tuple(batch.prompt(i).tolist()), row, index)


@contextmanager
def _reported(target: Path, size: int) -> Iterator[None]:
    """One line for whatever the file system refuses."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            fix = "free space there, raise the quota or file-size limit, or set skip.rollout.dump_dir elsewhere"
        else:
            fix = "set skip.rollout.dump_dir to a folder that can be written, or skip.rollout.enable=False"
        raise InfraError(
            f"cannot write the rollout dump {target} ({size} bytes): {error.strerror or error}; {fix}"
        ) from error
