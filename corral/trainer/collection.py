"""Collecting the samples an iteration trains on: generate, score, and with filter_groups go on until groups differ."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms.advantages import TRAITS
from corral.batch import Batch
from corral.config.plan import FilterGroups
from corral.data.prompts import Prompt
from corral.errors import TrainingError
from corral.rewards.pool import Score
from corral.trainer.generation import Generated
from corral.trainer.run import Run
from corral.trainer.scoring import token_level, values_of

log = logging.getLogger(__name__)

# Generation batches without a single group that varies, before a step without a limit gives up; at least one epoch.
HOPELESS = 10


@dataclass(frozen=True)
class Collected:
    """What an iteration trains on, in prompt order, n samples of each prompt next to each other.

    batch has its scores. scores: one a sample, as the scorer gave them. baseline [S]: score of the greedy response to
    the sample's prompt, for estimators that need it. ranks: whose replica made each sample (-1: replayed).
    generated_tokens: response tokens that "gen" made or loaded, those of dropped and of greedy samples too.
    """

    batch: Batch
    scores: list[Score]
    baseline: Tensor | None
    ranks: list[int]
    replayed: bool
    generated_tokens: int
    metrics: dict[str, float]

    @property
    def values(self) -> Tensor:
        """[S] float64: the scores' values."""
        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)


@dataclass(frozen=True)
class _Scored:
    made: Generated
    scores: list[Score]

    @property
    def tokens(self) -> int:
        return self.made.batch.response_ids.numel()


def collect(run: Run, step: int) -> Collected:
    """The iteration's samples, scored. Times "gen" and "reward".

    Raises DataError as the scorer does, and TrainingError when filter_groups finds too few groups.
    """
    rule = run.plan.algorithm.filter_groups
    metrics: dict[str, float] = {}
    if rule is None:
        with run.timers("gen"):
            made = run.generation.next(step)
        scored = _score(run, made)
        tokens = scored.tokens
    else:
        scored, tokens = _varied(run, step, rule, metrics)
    baseline = None
    traits = TRAITS.get(run.plan.algorithm.adv_estimator)
    if traits is not None and traits.needs_greedy_baseline:
        baseline, greedy_tokens = _greedy_scores(run, step, scored.made.prompts)
        metrics["remax/baseline/mean"] = float(baseline.mean())
        tokens += greedy_tokens
    batch = scored.made.batch
    values = torch.tensor([score.value for score in scored.scores], dtype=torch.float64)
    batch = batch.with_fields(scores=token_level(batch, values))
    return Collected(batch, scored.scores, baseline, scored.made.ranks, scored.made.replayed, tokens, metrics)


def _score(run: Run, made: Generated) -> _Scored:
    with run.timers("reward"):
        return _Scored(made, run.scorer.score(made.batch, made.prompts))


def _greedy_scores(run: Run, step: int, prompts: list[Prompt]) -> tuple[Tensor, int]:
    """[S]: the score of one greedy response a prompt, at each of the prompt's samples; and the tokens it took."""
    n = run.plan.rollout.sampling.n
    with run.timers("gen"):
        greedy = run.generation.greedy(prompts[::n], step)
    with run.timers("reward"):
        scores = run.scorer.score(greedy, prompts[::n])
    values = torch.tensor([score.value for score in scores], dtype=torch.float64)
    return values.repeat_interleave(n), greedy.response_ids.numel()


# Dynamic sampling ----------------------------------------------------------------------------------------------------


def _varied(run: Run, step: int, rule: FilterGroups, metrics: dict[str, float]) -> tuple[_Scored, int]:
    """train_batch_size groups whose metric varies, in the order they were generated; and all their tokens.

    DAPO (Yu et al., 2025, arXiv:2503.14476): a group whose samples all score alike has no advantage to learn from, so
    further prompts take its place. Groups beyond train_batch_size are dropped, the last generated first. A replayed
    batch is taken as it was kept.
    """
    with run.timers("gen"):
        replayed = run.generation.replayed(step)
    if replayed is not None:
        scored = _score(run, replayed)
        return scored, scored.tokens
    n, wanted = run.plan.rollout.sampling.n, run.plan.data.train_batch_size
    parts: list[_Scored] = []
    found = tokens = 0
    while found < wanted:
        _check_limit(run, step, rule, len(parts), found)
        with run.timers("gen"):
            made = run.generation.more(step, len(parts))
        scored = _score(run, made)
        tokens += scored.tokens
        values = values_of(scored.scores, made.batch.row.tolist(), rule.metric, "algorithm.filter_groups.metric")
        keep = varying_groups(values, n)
        parts.append(_take(scored, keep[: wanted - found], n))
        found += len(keep)
    metrics.update(
        {
            "filter_groups/gen_batches": float(len(parts)),
            "filter_groups/generated_groups": float(len(parts) * wanted),
            "filter_groups/varying_groups": float(found),
            "filter_groups/surplus_groups": float(found - wanted),
            "filter_groups/varying_share": found / (len(parts) * wanted),
        }
    )
    whole = _joined(parts, n)
    with run.timers("gen"):
        run.generation.record(step, whole.made.batch)
    return whole, tokens


def varying_groups(values: Tensor, n: int) -> list[int]:
    """Numbers of the groups of n neighbouring samples whose values [groups · n] are not all equal."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1).nonzero()[:, 0].tolist()


def _check_limit(run: Run, step: int, rule: FilterGroups, batches: int, found: int) -> None:
    """Raises TrainingError when the step may not generate again, or when a whole epoch gave nothing to train on."""
    wanted = run.plan.data.train_batch_size
    so_far = (
        f"step {step}: after {batches} generation batches of {wanted} prompts, {found} of the {wanted} prompts needed "
        f"have samples whose {rule.metric} differs"
    )
    if rule.max_num_gen_batches and batches >= rule.max_num_gen_batches:
        raise TrainingError(
            f"{so_far}; raise algorithm.filter_groups.max_num_gen_batches={rule.max_num_gen_batches} or "
            "actor_rollout_ref.rollout.n, or use prompts that are neither too easy nor too hard"
        )
    if found == 0 and batches >= max(HOPELESS, run.loader.steps_per_epoch):
        raise TrainingError(
            f"{so_far}, and that is all of the data; raise actor_rollout_ref.rollout.n, look at the reward, or use "
            "prompts that are neither too easy nor too hard"
        )
    if batches:
        log.info("filter_groups: %s: generating further prompts", so_far)


def _take(scored: _Scored, groups: list[int], n: int) -> _Scored:
    index = [group * n + k for group in groups for k in range(n)]
    made = scored.made.select(index)
    return _Scored(made, [scored.scores[i] for i in index])


def _joined(parts: list[_Scored], n: int) -> _Scored:
    """All parts as one, their groups numbered anew."""
    batch = Batch.concat([part.made.batch for part in parts])
    batch = batch.with_fields(group=torch.arange(len(batch)) // n)
    made = Generated(
        batch,
        [prompt for part in parts for prompt in part.made.prompts],
        [rank for part in parts for rank in part.made.ranks],
    )
    return _Scored(made, [score for part in parts for score in part.scores])
