"""PPO, one synchronous iteration after the other.

What this is not: no overlap of generation and training. Generate with the current policy and score, take log-probs and
values under the weights that generated, estimate advantages, then update the critic, if there is one, and the actor on
fixed mini-batches of prompts, and hand the new weights to the engine that generates. GRPO and its relatives are the
same script with another estimator.
"""

from __future__ import annotations

import logging
import sys

import torch
from tqdm import tqdm

from corral.batch import Batch
from corral.config.plan import Plan
from corral.errors import TrainingError
from corral.exits import raise_lost_signal
from corral.trainer.advantages import corrected, resampled, with_advantages, with_rewards
from corral.trainer.collection import collect
from corral.trainer.generation import push_weights
from corral.trainer.metrics import (
    balance_metrics,
    console_line,
    data_metrics,
    mean_of_tokens,
    memory_metrics,
    mfu_metrics,
    prefixed,
    rollout_metrics,
    timing_metrics,
)
from corral.trainer.phase_records import record_phases
from corral.trainer.run import Run
from corral.trainer.validation import validate
from corral.workers.update import Update

log = logging.getLogger(__name__)

# Iterations in a row in which an optimizer step was skipped for a non-finite gradient, before the run gives up.
MAX_NON_FINITE = 3


def fit(run: Run) -> None:
    """Train to the horizon, from wherever the run stands."""
    trainer, start = run.plan.trainer, run.progress.step
    if trainer.val_before_train or trainer.val_only:
        report(run, start, validate(run, step=start))
    if trainer.val_only:
        return
    steps = range(start + 1, run.total_steps + 1)
    for step in tqdm(steps, initial=start, total=run.total_steps, unit="step", disable=not sys.stderr.isatty()):
        raise_lost_signal()
        metrics = iterate(run, step)
        if due(trainer.test_freq, step, run.total_steps):
            with run.timers("testing"):
                metrics.update(validate(run, step))
            metrics["timing_s/testing"] = run.timers.take()["testing"]
        report(run, step, metrics)
        if run.progress.non_finite == MAX_NON_FINITE:
            raise TrainingError(
                f"non-finite gradients in {MAX_NON_FINITE} iterations in a row, the last is step {step}; "
                "lower the learning rate or look at the rewards and the KL terms"
            )


def iterate(run: Run, step: int) -> dict[str, float]:
    """One iteration, saved if it is due: its metrics."""
    plan, group, timer = run.plan, run.group, run.timers
    algorithm = plan.algorithm
    metrics = {"training/global_step": float(step), "training/epoch": float(run.loader.epoch)}
    with timer("step"):
        collected = collect(run, step)
        metrics["rollout/replayed"] = float(collected.replayed)
        batch = with_old_log_probs(run, collected.batch, metrics)
        if plan.ref is not None:
            with timer("ref"):
                ref = group.infer("ref", batch, temperature=plan.rollout.sampling.temperature)
                batch = batch.with_fields(ref_log_probs=finite("reference", ref["log_probs"]))
        if plan.critic is not None:
            with timer("values"):
                batch = batch.with_fields(values=finite("critic", group.infer("critic", batch)["values"]))
        with timer("adv"):
            batch, kl = with_rewards(algorithm, batch, run.kl_coefficient)
            batch, components = with_advantages(run.estimator, algorithm, batch, collected)
            training = resampled(algorithm, batch, collected.values, step)
        updates: list[Update] = []
        if plan.critic is not None:
            with timer("update_critic"):
                updates.append(group.update_critic(training, step))
                metrics.update(prefixed("critic", updates[-1].metrics))
        if step > plan.trainer.critic_warmup:
            with timer("update_actor"):
                updates.append(group.update_actor(training, step))
                metrics.update(prefixed("actor", updates[-1].metrics))
                if plan.actor_update.use_kl_loss:
                    metrics["actor/kl_coef"] = plan.actor_update.kl_loss_coef
            with timer("update_weights"):
                after_update(run, updates[-1], metrics)
        run.progress.finish(step, skipped=sum(update.skipped for update in updates))
        if due(plan.trainer.save_freq, step, run.total_steps):
            with timer("save_checkpoint"):
                run.checkpoints.save(group)
        if plan.trainer.record_phases != "none":
            with timer("record_phases"):
                record_phases(run, step, batch, collected, updates)
    metrics.update({**kl, **components, **collected.metrics})
    metrics.update(data_metrics(batch, collected.values, plan.data.max_prompt_length))
    metrics.update(balance_metrics(batch, plan.actor, plan.trainer.balance_batch))
    metrics.update(memory_metrics())
    seconds = timer.take()
    metrics.update(timing_metrics(batch, seconds, plan.topology.world, collected.generated_tokens))
    metrics.update(mfu_metrics(run.speed, training, passes(plan), seconds, plan.topology.world))
    dump_samples(run, step, batch, collected.values)
    return metrics


def passes(plan: Plan) -> dict[str, int]:
    """How often the update of each role goes through the samples of an iteration."""
    return {"actor": plan.actor_update.epochs, "critic": plan.critic_update.epochs if plan.critic_update else 0}


def with_old_log_probs(run: Run, batch: Batch, metrics: dict[str, float]) -> Batch:
    """Log-probs under the weights that generated, and what rollout correction makes of them.

    The actor's pass is left out when nothing needs it: bypass_mode takes the engine's log-probs, unless samples are to
    be rejected by the gap of both, or the estimator reads Σ π².
    """
    algorithm = run.plan.algorithm
    rule = algorithm.rollout_correction
    assert batch.rollout_log_probs is not None
    finite("rollout engine", batch.rollout_log_probs)
    if rule is not None and rule.bypass_mode and not rule.rejections and not algorithm.sum_pi_squared:
        return corrected(algorithm, batch, None)[0]
    with run.timers("old_log_prob"):
        scored = run.group.infer(
            "actor",
            batch,
            temperature=run.plan.rollout.sampling.temperature,
            entropy=True,
            sum_pi_squared=algorithm.sum_pi_squared,
        )
        present = finite("actor", scored["log_probs"])
        metrics["actor/entropy"] = mean_of_tokens(batch, scored["entropy"])
        metrics.update(rollout_metrics(batch, present))
        if algorithm.sum_pi_squared:
            batch = batch.with_fields(sum_pi_squared=scored["sum_pi_squared"])
        batch, correction = corrected(algorithm, batch, present)
    metrics.update(correction)
    return batch


def finite(role: str, scored: torch.Tensor) -> torch.Tensor:
    """The same [R]. Raises TrainingError when a role's results are not numbers: nothing after them could be."""
    strange = int((~scored.isfinite()).sum())
    if strange:
        raise TrainingError(
            f"{strange} of {scored.numel()} results of the {role} are not finite: its weights overflowed or hold NaN; "
            "lower its learning rate, or check its model folder"
        )
    return scored


def after_update(run: Run, update: Update, metrics: dict[str, float]) -> None:
    """Hand the new weights to the engine, if one is running, and prove that they arrived.

    A step with a non-finite gradient changes no weights; when all of them were skipped there is nothing to push.
    """
    if update.skipped:
        log.warning("%d of %d optimizer steps skipped: non-finite gradient", update.skipped, update.optimizer_steps)
    if run.group.rollout_started and update.skipped < update.optimizer_steps:
        metrics["rollout/probe_gap"] = push_weights(run.group, run.plan, run.probe)


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
