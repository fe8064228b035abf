"""Validation: generate on held-out prompts with val_kwargs, score, and report the mean per data source."""

from __future__ import annotations

import logging
import time

from corral.data.prompts import Prompt
from corral.rollout.base import Completion, Request
from corral.trainer.generation import as_batch
from corral.trainer.metrics import mean
from corral.trainer.run import Run

log = logging.getLogger(__name__)


def validate(run: Run, step: int) -> dict[str, float]:
    """val-core/{source}/reward/mean@N, N samples a prompt, over the whole validation set."""
    assert run.validation is not None
    prompts = run.validation.batch(range(len(run.validation)))
    sampling = run.plan.rollout.val_sampling
    run.generation.start()
    batch = as_batch(prompts, generate_all(run, prompts, step), sampling.n)
    scores = run.scorer.score(batch, [prompt for prompt in prompts for _ in range(sampling.n)])
    by_source: dict[str, list[float]] = {}
    for i, score in enumerate(scores):
        by_source.setdefault(prompts[i // sampling.n].data_source, []).append(score.value)
    metrics = {f"val-core/{source}/reward/mean@{sampling.n}": mean(values) for source, values in by_source.items()}
    metrics["val-aux/response_length/mean"] = float(batch.response_lengths.double().mean())
    return metrics


def generate_all(run: Run, prompts: list[Prompt], step: int) -> list[Completion]:
    """Completions of every prompt. On a CPU a large set says first what it will cost, from a timed first slice."""
    sampling = run.plan.rollout.val_sampling
    requests = [
        Request(prompt_ids=prompt.prompt_ids, row=prompt.row, sample_index=k)
        for prompt in prompts
        for k in range(sampling.n)
    ]
    first = 0
    done: list[Completion] = []
    if run.plan.topology.device == "cpu" and len(prompts) > run.plan.trainer.val_cost_rows:
        log.warning(
            "validation: %d prompts, up to %d tokens to generate on a CPU; limit it with data.val_max_samples",
            len(prompts), len(requests) * run.plan.rollout.response_length,
        )  # fmt: skip
        first = min(len(requests), run.plan.rollout.max_num_seqs * run.plan.topology.world)
        start = time.monotonic()
        done = run.group.generate(requests[:first], sampling, step)
        log.warning("validation: about %.0f s in all", (time.monotonic() - start) * len(requests) / first)
    return done + run.group.generate(requests[first:], sampling, step)
