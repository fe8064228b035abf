"""The first phase of a step: a batch of samples, generated now or replayed from a recording (skip.rollout)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property

import torch

from corral.batch import Batch
from corral.config.plan import Plan
from corral.data.loader import PromptLoader
from corral.data.prompts import Prompt, PromptDataset
from corral.errors import TrainingError
from corral.rollout.base import Completion, Request
from corral.rollout.fingerprint import Fingerprint, fingerprint
from corral.rollout.replay import DumpMismatch, Replay
from corral.workers.group import WorkerGroup

log = logging.getLogger(__name__)


class Generation:
    """Hands out the batch of each step. The loader advances every step, whether or not the step is replayed."""

    def __init__(
        self,
        plan: Plan,
        group: WorkerGroup,
        loader: PromptLoader,
        dataset: PromptDataset,
        *,
        probe: Batch,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._plan = plan
        self._group = group
        self._loader = loader
        self._dataset = dataset
        self._probe = probe
        self._eos_token_ids = eos_token_ids
        self._replay = Replay(plan.skip) if plan.skip.enable else None

    def next(self, step: int) -> tuple[Batch, list[Prompt], bool]:
        """The batch in prompt order, the prompt of each sample, and whether it was replayed."""
        prompts = self._loader.next_batch()
        n = self._plan.rollout.sampling.n
        requests = [
            Request(prompt_ids=prompt.prompt_ids, row=prompt.row, sample_index=k)
            for prompt in prompts
            for k in range(n)
        ]
        recorded = self._recorded(step, requests)
        if recorded is not None:
            return recorded, self._dataset.of_rows(recorded.row.tolist()), True
        self.start()
        dtype = torch.float64 if self._plan.actor.master_dtype == "float64" else torch.float32
        batch = as_batch(prompts, self._group.generate(requests, self._plan.rollout.sampling, step), n, dtype)
        if self._replay is not None and self._replay.applies(step):
            path = self._replay.store(step, batch, self._fingerprint)
            log.info("skip.rollout: step %d recorded in %s", step, path)
        return batch, [prompt for prompt in prompts for _ in range(n)], False

    def start(self) -> None:
        """Start the engine if none is running, with the actor's present weights."""
        if not self._group.rollout_started:
            self._group.start_rollout(self._eos_token_ids)
            push_weights(self._group, self._plan, self._probe)

    def _recorded(self, step: int, requests: Sequence[Request]) -> Batch | None:
        if self._replay is None or not self._replay.applies(step):
            return None
        path = self._replay.find(step)
        if path is None:
            log.info("skip.rollout: nothing recorded for step %d in %s yet: generating", step, self._plan.skip.dump_dir)
            return None
        try:
            batch = self._replay.load(path, self._fingerprint, step=step, requests=requests)
        except DumpMismatch as mismatch:
            log.warning("skip.rollout: %s; generating step %d anew", mismatch, step)
            return None
        log.info("skip.rollout: step %d replayed from %s, nothing is generated", step, path)
        return batch

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        """Read once: it digests the model folder and the training files."""
        return fingerprint(self._plan)


def push_weights(group: WorkerGroup, plan: Plan, probe: Batch) -> float:
    """Give the engine the actor's weights and prove that they arrived: the log-prob gap on the probe.

    Raises:
        TrainingError: the gap is above the plan's tolerance, or is no number.
    """
    gap = group.push_weights(probe)
    if math.isnan(gap):
        raise TrainingError(
            "log-probs of the probe prompt are not finite: the actor's weights overflowed or hold NaN; lower the "
            "learning rate, or check the model folder"
        )
    if not gap <= plan.rollout.probe_tolerance:
        raise TrainingError(
            f"the rollout engine's log-probs differ from the trainer's by {gap:.3g} on the probe prompt (tolerance "
            f"{plan.rollout.probe_tolerance:.3g}): the engine does not run the trainer's weights"
        )
    return gap


def as_batch(
    prompts: Sequence[Prompt], completions: Sequence[Completion], n: int, dtype: torch.dtype = torch.float32
) -> Batch:
    """Samples of each prompt next to each other, in the order of the prompts; a group is one prompt's samples."""
    samples = len(completions)
    return Batch.from_samples(
        [prompts[i // n].prompt_ids for i in range(samples)],
        [completion.token_ids for completion in completions],
        row=[prompts[i // n].row for i in range(samples)],
        sample_index=[i % n for i in range(samples)],
        group=[i // n for i in range(samples)],
        finish=[completion.finish for completion in completions],
        rollout_log_probs=[completion.log_probs for completion in completions],
        dtype=dtype,
    )
