"""The first phase of a step: samples, generated now or replayed from a recording (skip.rollout)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Generated:
    """Samples in prompt order; of each sample its prompt, and the rank whose replica made it (-1: replayed)."""

    batch: Batch
    prompts: list[Prompt]
    ranks: list[int]
    replayed: bool = False

    def select(self, index: list[int]) -> Generated:
        """The samples at `index`, in that order."""
        prompts, ranks = [self.prompts[i] for i in index], [self.ranks[i] for i in index]
        return Generated(self.batch.select(index), prompts, ranks, self.replayed)


class Generation:
    """Hands out the samples of each step. The loader advances every step, whether or not the step is replayed."""

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
        self._dtype = torch.float64 if plan.actor.master_dtype == "float64" else torch.float32

    def next(self, step: int) -> Generated:
        """The samples of the next prompts, recorded or replayed if skip.rollout says so."""
        prompts = self._loader.next_batch()
        replayed = self._replayed(step, self._requests(prompts))
        if replayed is not None:
            return replayed
        made = self._generate(prompts, step)
        self.record(step, made.batch)
        return made

    def more(self, step: int, part: int) -> Generated:
        """Part 0, 1, ... of a step that generates until it has enough; none of them is recorded or replayed.

        Samples of the parts differ also where the data is short and a prompt comes by twice: the sample indices of a
        part go on where those of the part before it end, and they key the random streams.
        """
        return self._generate(self._loader.next_batch(), step, first_index=part * self._plan.rollout.sampling.n)

    def replayed(self, step: int) -> Generated | None:
        """The recorded batch of a step whose prompts are known only once it has been generated.

        The loader advances by one batch of prompts.
        """
        found = self._replayed(step, None)
        if found is not None:
            self._loader.next_batch()
        return found

    def record(self, step: int, batch: Batch) -> None:
        """Keep the step's batch if skip.rollout asks for it."""
        if self._replay is not None and self._replay.applies(step):
            path = self._replay.store(step, batch, self._fingerprint)
            log.info("skip.rollout: step %d recorded in %s", step, path)

    def greedy(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """One greedy sample a prompt, with the actor's present weights."""
        return self._samples(prompts, step, n=1, greedy=True)

    def start(self) -> None:
        """Start the engine if none is running, with the actor's present weights."""
        if not self._group.rollout_started:
            self._group.start_rollout(self._eos_token_ids)
            push_weights(self._group, self._plan, self._probe)

    def _generate(self, prompts: Sequence[Prompt], step: int, first_index: int = 0) -> Generated:
        n = self._plan.rollout.sampling.n
        batch = self._samples(prompts, step, n=n, first_index=first_index)
        ranks = self._group.replica_ranks(len(batch))
        return Generated(batch, [prompt for prompt in prompts for _ in range(n)], ranks)

    def _samples(
        self, prompts: Sequence[Prompt], step: int, *, n: int, first_index: int = 0, greedy: bool = False
    ) -> Batch:
        self.start()
        sampling = self._plan.rollout.sampling
        if greedy:
            sampling = replace(sampling, do_sample=False, n=1)
        requests = self._requests(prompts, n, first_index)
        return as_batch(prompts, self._group.generate(requests, sampling, step), n, self._dtype, first_index)

    def _requests(self, prompts: Sequence[Prompt], n: int | None = None, first_index: int = 0) -> list[Request]:
        count = self._plan.rollout.sampling.n if n is None else n
        return [
            Request(prompt_ids=prompt.prompt_ids, row=prompt.row, sample_index=first_index + k)
            for prompt in prompts
            for k in range(count)
        ]

    def _replayed(self, step: int, requests: Sequence[Request] | None) -> Generated | None:
        if self._replay is None or not self._replay.applies(step):
            return None
        path = self._replay.find(step)
        if path is None:
            log.info("skip.rollout: nothing recorded for step %d in %s yet: generating", step, self._plan.skip.dump_dir)
            return None
        try:
            batch = self._replay.load(path, self._fingerprint, step=step, requests=requests)
            prompts = self._dataset.of_rows(batch.row.tolist())
            if requests is None and any(
                batch.prompt(i).tolist() != list(prompt.prompt_ids) for i, prompt in enumerate(prompts)
            ):
                raise DumpMismatch(path, ["prompts of its data rows are others"])
        except DumpMismatch as mismatch:
            log.warning("skip.rollout: %s; generating step %d anew", mismatch, step)
            return None
        log.info("skip.rollout: step %d replayed from %s, nothing is generated", step, path)
        return Generated(batch, prompts, [-1] * len(batch), replayed=True)

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
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    n: int,
    dtype: torch.dtype = torch.float32,
    first_index: int = 0,
) -> Batch:
    """Samples of each prompt next to each other, in the order of the prompts; a group is one prompt's samples."""
    samples = len(completions)
    return Batch.from_samples(
        [prompts[i // n].prompt_ids for i in range(samples)],
        [completion.token_ids for completion in completions],
        row=[prompts[i // n].row for i in range(samples)],
        sample_index=[first_index + i % n for i in range(samples)],
        group=[i // n for i in range(samples)],
        finish=[completion.finish for completion in completions],
        rollout_log_probs=[completion.log_probs for completion in completions],
        dtype=dtype,
    )
