"""PPO, one synchronous iteration after the other.

What this is not: no overlap of generation and training, no group estimators, no rollout correction. Generate with the
current policy, score, take log-probs and values under the weights that generated, estimate advantages, then update the
critic and the actor on fixed mini-batches of prompts, and hand the new weights to the engine that generates.
"""

from __future__ import annotations

import logging
import sys

import torch
from tqdm import tqdm

from corral.algorithms.advantages import ESTIMATORS, AdvantageInput
from corral.algorithms.kl import kl_in_reward
from corral.algorithms.segments import mean_of_sample_means
from corral.batch import Batch
from corral.errors import TrainingError
from corral.trainer.generation import push_weights
from corral.trainer.metrics import (
    console_line,
    data_metrics,
    mean_of_tokens,
    prefixed,
    rollout_metrics,
    timing_metrics,
)
from corral.trainer.run import Run
from corral.trainer.scoring import token_level
from corral.trainer.validation import validate
from corral.workers.group import Update

log = logging.getLogger(__name__)

# Iterations in a row in which an optimizer step was skipped for a non-finite gradient, before the run gives up.
MAX_NON_FINITE = 3


def fit(run: Run) -> None:
    """Train to the horizon."""
    trainer = run.plan.trainer
    if trainer.val_before_train or trainer.val_only:
        report(run, 0, validate(run, step=0))
    if trainer.val_only:
        return
    non_finite = 0
    for step in tqdm(range(1, run.total_steps + 1), unit="step", disable=not sys.stderr.isatty()):
        metrics, skipped = iterate(run, step)
        if due(trainer.test_freq, step, run.total_steps):
            with run.timers("testing"):
                metrics.update(validate(run, step))
            metrics["timing_s/testing"] = run.timers.take()["testing"]
        report(run, step, metrics)
        non_finite = non_finite + 1 if skipped else 0
        if non_finite == MAX_NON_FINITE:
            raise TrainingError(
                f"non-finite gradients in {MAX_NON_FINITE} iterations in a row, the last is step {step}; "
                "lower the learning rate or look at the rewards and the KL terms"
            )


def iterate(run: Run, step: int) -> tuple[dict[str, float], int]:
    """One iteration: its metrics, and how many optimizer steps were skipped for a non-finite gradient."""
    plan, group, timer = run.plan, run.group, run.timers
    temperature = plan.rollout.sampling.temperature
    epoch = run.loader.epoch
    with timer("step"):
        with timer("gen"):
            batch, prompts, replayed = run.generation.next(step)
        with timer("reward"):
            scored = run.scorer.score(batch, prompts)
            sample_scores = torch.tensor([score.value for score in scored], dtype=torch.float64)
            batch = batch.with_fields(scores=token_level(batch, sample_scores))
        with timer("old_log_prob"):
            old = group.infer("actor", batch, temperature=temperature, entropy=True)
            batch = batch.with_fields(old_log_probs=finite("actor", old["log_probs"]))
        if plan.ref is not None:
            with timer("ref"):
                ref = group.infer("ref", batch, temperature=temperature)
                batch = batch.with_fields(ref_log_probs=finite("reference", ref["log_probs"]))
        if plan.critic is not None:
            with timer("values"):
                batch = batch.with_fields(values=finite("critic", group.infer("critic", batch)["values"]))
        with timer("adv"):
            batch, kl = with_advantages(run, batch)
        metrics = {"training/global_step": float(step), "training/epoch": float(epoch)}
        metrics["rollout/replayed"] = float(replayed)
        metrics["actor/entropy"] = mean_of_tokens(batch, old["entropy"])
        updates: list[Update] = []
        if plan.critic is not None:
            with timer("update_critic"):
                updates.append(group.update_critic(batch, step))
                metrics.update(prefixed("critic", updates[-1].metrics))
        if step > plan.trainer.critic_warmup:
            with timer("update_actor"):
                updates.append(group.update_actor(batch, step))
                metrics.update(prefixed("actor", updates[-1].metrics))
            with timer("update_weights"):
                after_update(run, updates[-1], metrics)
        if due(plan.trainer.save_freq, step, run.total_steps):
            with timer("save_checkpoint"):
                save(run, step)
    metrics.update(kl)
    metrics.update(data_metrics(batch, sample_scores, plan.data.max_prompt_length))
    metrics.update(rollout_metrics(batch))
    metrics.update(timing_metrics(batch, timer.take(), plan.topology.world))
    dump_samples(run, step, batch, sample_scores)
    return metrics, sum(update.skipped for update in updates)


def finite(role: str, scored: torch.Tensor) -> torch.Tensor:
    """The same [R]. Raises TrainingError when a role's results are not numbers: nothing after them could be."""
    strange = int((~scored.isfinite()).sum())
    if strange:
        raise TrainingError(
            f"{strange} of {scored.numel()} results of the {role} are not finite: its weights overflowed or hold NaN; "
            "lower its learning rate, or check its model folder"
        )
    return scored


def with_advantages(run: Run, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """Rewards (scores, with the KL to the reference when it is part of the reward), advantages and returns."""
    algorithm = run.plan.algorithm
    metrics: dict[str, float] = {}
    assert batch.scores is not None
    rewards = batch.scores
    if algorithm.use_kl_in_reward:
        assert batch.old_log_probs is not None
        assert batch.ref_log_probs is not None
        rewards, penalty = kl_in_reward(
            batch.scores,
            batch.old_log_probs,
            batch.ref_log_probs,
            batch.response_mask,
            algorithm.kl_ctrl.kl_coef,
            algorithm.kl_penalty,
        )
        metrics = {
            "actor/reward_kl_penalty": float(
                mean_of_sample_means(penalty, batch.response_mask, batch.response_offsets)
            ),
            "actor/reward_kl_penalty_coeff": algorithm.kl_ctrl.kl_coef,
        }
    assert batch.values is not None
    advantages, returns = ESTIMATORS[algorithm.adv_estimator](
        AdvantageInput(
            rewards=rewards,
            values=batch.values.double(),
            mask=batch.response_mask,
            offsets=batch.response_offsets,
            group=batch.group,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
    )
    return batch.with_fields(rewards=rewards, advantages=advantages, returns=returns), metrics


def after_update(run: Run, update: Update, metrics: dict[str, float]) -> None:
    """Hand the new weights to the engine, if one is running, and prove that they arrived.

    A step with a non-finite gradient changes no weights; when all of them were skipped there is nothing to push.
    """
    if update.skipped:
        log.warning("%d of %d optimizer steps skipped: non-finite gradient", update.skipped, update.optimizer_steps)
    if run.group.rollout_started and update.skipped < update.optimizer_steps:
        metrics["rollout/probe_gap"] = push_weights(run.group, run.plan, run.probe)


def save(run: Run, step: int) -> None:
    """Export actor and critic as model folders under global_step_N."""
    roles = ("actor",) if run.plan.critic is None else ("actor", "critic")
    for role in roles:
        run.group.save(role, f"{run.plan.trainer.checkpoint_dir}/global_step_{step}/{role}/huggingface")


def report(run: Run, step: int, metrics: dict[str, float]) -> None:
    """metrics.jsonl always; the console line when asked for; the ranks' phases into the trace."""
    run.records.metrics(step, metrics)
    run.timers.ranks(run.group.trace(), run.plan.topology.devices_per_node)
    if "console" in run.plan.trainer.logger:
        tqdm.write(console_line(step, metrics), file=sys.stdout)
        sys.stdout.flush()


def due(freq: int, step: int, last: int) -> bool:
    """Every `freq` steps and on the last one; never when freq is not positive."""
    return freq > 0 and (step % freq == 0 or step == last)


def dump_samples(run: Run, step: int, batch: Batch, scores: torch.Tensor) -> None:
    """One JSON line a sample under trainer.rollout_data_dir, when it is set."""
    folder = run.plan.trainer.rollout_data_dir
    if folder is None:
        return
    texts = run.scorer.texts(batch)
    rows = [
        {
            "step": step,
            "row": int(batch.row[i]),
            "sample_index": int(batch.sample_index[i]),
            "prompt_ids": batch.prompt(i).tolist(),
            "response_ids": batch.response(i).tolist(),
            "output": texts[i],
            "score": float(scores[i]),
            "values": batch.response(i, "values").tolist() if batch.values is not None else None,
        }
        for i in range(len(batch))
    ]
    run.records.samples(folder, step, rows)
