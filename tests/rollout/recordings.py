"""Batches, fingerprints and requests to record."""

from __future__ import annotations

import torch

from corral.batch import Batch
from corral.config.plan import SkipPlan
from corral.rollout.base import Request
from corral.rollout.fingerprint import Fingerprint

FINGERPRINT = Fingerprint(
    model="a" * 40,
    tokenizer="b" * 40,
    data="c" * 40,
    sampling={"temperature": 0.7, "top_k": -1, "seed": 42, "ignore_eos": False},
    sizes={"prompt_length": 16, "response_length": 8, "samples": 4},
)


def skip_plan(folder: object, *, steps: tuple[int, ...] = (1, 2, 3), action: str = "cache") -> SkipPlan:
    return SkipPlan(enable=True, dump_dir=str(folder), steps=steps, action=action)


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Four samples of two prompts, one response empty of policy tokens, every finish reason."""
    base = 10 * seed
    made = Batch.from_samples(
        [[base + 1, 2, 3], [base + 1, 2, 3], [base + 4], [base + 4]],
        [[5, 6], [7], [8, 9, 10], [11]],
        row=[30, 30, 12, 12],
        sample_index=[0, 1, 0, 1],
        group=[0, 0, 1, 1],
        finish=["stop", "length", "abort", "stop"],
        rollout_log_probs=[[-0.1, -1 / 3], [-2.0], [-0.5, -1e-9, -7.25], [-3.5]],
        dtype=dtype,
    )
    mask = made.response_mask.clone()
    mask[1] = False
    return made.with_fields(response_mask=mask)


def requests(recorded: Batch) -> list[Request]:
    return [
        Request(tuple(recorded.prompt(i).tolist()), int(recorded.row[i]), int(recorded.sample_index[i]))
        for i in range(len(recorded))
    ]
