"""A recorded step whose responses the test chooses: the way to train on lengths that sampling seldom gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from corral.batch import Batch
from corral.config.resolve import resolve
from corral.rollout.fingerprint import fingerprint
from corral.rollout.replay import TENSORS, Replay
from tests.trainer.runs import train_here

Change = Callable[[int, list[int]], list[int]]


def skip_overrides(folder: Path, *steps: int) -> list[str]:
    return [
        "skip.rollout.enable=True",
        f"skip.rollout.dump_dir={folder}",
        f"skip.rollout.steps=[{','.join(map(str, steps))}]",
    ]


def record(overrides: Sequence[str], change: Change) -> None:
    """Run the step that `overrides` describe (with skip.rollout for step 1), then put other responses in its dump.

    change: sample index and its token ids → the token ids to record instead.
    """
    assert train_here(overrides) == 0
    plan = resolve(overrides).plan
    replay = Replay(plan.skip)
    path = replay.find(1)
    assert path is not None
    tensors = load_file(path / TENSORS)
    made = Batch(is_padding=torch.zeros(tensors["row"].numel(), dtype=torch.bool), **tensors)
    responses = [change(i, made.response(i).tolist()) for i in range(len(made))]
    changed = Batch.from_samples(
        [made.prompt(i).tolist() for i in range(len(made))],
        responses,
        row=made.row.tolist(),
        sample_index=made.sample_index.tolist(),
        group=made.group.tolist(),
        finish=["stop" if response else "abort" for response in responses],
        rollout_log_probs=[[-6.0] * len(response) for response in responses],
    )
    replay.store(1, changed, fingerprint(plan))
