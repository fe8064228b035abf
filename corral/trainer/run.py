"""Everything one run holds, made in the order that fails early and cheaply: files, rows, records, then processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from corral.algorithms.advantages import Estimator, estimator
from corral.algorithms.policy_losses import policy_loss
from corral.batch import Batch
from corral.config.check import validates
from corral.config.checkpoints import find
from corral.config.plan import Plan
from corral.data.loader import PromptLoader
from corral.data.prompts import PromptDataset
from corral.data.tokenizer import load_tokenizer
from corral.engine.device import require
from corral.errors import ConfigError, DataError, InfraError
from corral.rewards.pool import RewardPool
from corral.rewards.registry import scorer_for
from corral.rollout.eos import eos_ids
from corral.trainer.checkpoints import Checkpoints, Progress
from corral.trainer.generation import Generation
from corral.trainer.kl_coefficient import KLCoefficient
from corral.trainer.records import Records
from corral.trainer.scoring import Scorer
from corral.trainer.timing import Timers
from corral.workers.group import WorkerGroup
from corral.workers.in_process import InProcess
from corral.workers.launcher import Launcher, LineSink, sink_for
from corral.workers.worker import Speed, Worker

log = logging.getLogger(__name__)

# Imported once on each node before its ranks are forked, so that eight ranks do not pay eight imports.
PRELOAD = ("corral.workers.worker",)


@dataclass(frozen=True)
class Run:
    """What the algorithm works with. `validation` is None when there is nothing to validate on."""

    plan: Plan
    total_steps: int
    loader: PromptLoader
    validation: PromptDataset | None
    group: WorkerGroup
    speed: Speed
    generation: Generation
    scorer: Scorer
    records: Records
    timers: Timers
    probe: Batch
    estimator: Estimator
    kl_coefficient: KLCoefficient
    progress: Progress
    checkpoints: Checkpoints


@contextmanager
def open_run(plan: Plan, config: Mapping[str, Any]) -> Iterator[Run | None]:
    """Open a run and close whatever it started, also when it fails half-way.

    None, with nothing started or written: it goes on from a checkpoint at its last step or beyond.
    """
    sink = sink_for(os.environ)
    if plan.topology.ray_address is None:  # on a cluster it is the nodes that need the devices
        require(plan.topology.device, plan.topology.devices_per_node)
    # A user's own estimator or loss that cannot be imported should not cost the start of the workers.
    chosen = estimator(plan.algorithm.adv_estimator)
    policy_loss(plan.actor_update.loss_mode, plan.algorithm.rollout_correction)
    tokenizer = load_tokenizer(plan.actor.model)
    train, validation = _datasets(plan, tokenizer)
    data = plan.data
    loader = PromptLoader(train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
    total_steps = _total_steps(plan, loader)
    kl_coefficient = KLCoefficient(plan.algorithm.kl_ctrl, plan.algorithm.kl_ctrl.kl_coef)
    progress = Progress()
    checkpoints = Checkpoints(plan, loader, kl_coefficient, progress, total_steps)
    trainer = plan.trainer
    resumed = find(trainer.resume_mode, trainer.resume_from_path, trainer.checkpoint_dir)
    if resumed is not None:
        checkpoints.restore_driver(resumed)
        if progress.step >= total_steps and not trainer.val_only:
            log.info("%s is at step %d of %d: nothing to do", resumed.folder, progress.step, total_steps)
            yield None
            return
    probe = _probe(train)
    ids = _end_tokens(plan, tokenizer)
    with ExitStack() as stack:
        records = Records(plan.trainer.run_dir)
        stack.callback(records.close)
        records.plan(plan, config)
        timers = stack.enter_context(_traced(records))
        rewards = stack.enter_context(RewardPool(plan.reward))
        if plan.reward.custom_path is not None:
            rewards.ready()
        with timers("start_workers"):
            launcher = _launch(plan, total_steps, records, sink)
        stack.callback(launcher.close)
        group = WorkerGroup(launcher, plan)
        if resumed is not None:
            with timers("load_checkpoint"):
                checkpoints.restore_workers(group, resumed)
        yield Run(
            plan=plan,
            total_steps=total_steps,
            loader=loader,
            validation=validation,
            group=group,
            speed=group.speed(),
            generation=Generation(plan, group, loader, train, probe=probe, eos_token_ids=ids),
            scorer=Scorer(rewards, tokenizer),
            records=records,
            timers=timers,
            probe=probe,
            estimator=chosen,
            kl_coefficient=kl_coefficient,
            progress=progress,
            checkpoints=checkpoints,
        )


def _datasets(plan: Plan, tokenizer: Any) -> tuple[PromptDataset, PromptDataset | None]:
    """Of training and validation, all of whose data sources can be scored."""
    data = plan.data
    train = PromptDataset(data.train_files, data, tokenizer, data.train_max_samples)
    validation = None
    if validates(plan):
        validation = PromptDataset(data.val_files, data, tokenizer, data.val_max_samples)
    if plan.reward.custom_path is None:
        for source in sorted(train.data_sources.union(validation.data_sources if validation else ())):
            scorer_for(source)  # a data source that nobody can score is told now, not after the first generation
    return train, validation


def _end_tokens(plan: Plan, tokenizer: Any) -> tuple[int, ...]:
    ids = eos_ids(plan.actor.model.path, tokenizer)
    if not ids and not plan.rollout.ignore_eos:
        raise DataError(
            f"neither {plan.actor.model.path} nor its tokenizer names an end token, so no response could end before "
            "the cap; add eos_token_id to generation_config.json, or set actor_rollout_ref.rollout.ignore_eos=True"
        )
    return ids


@contextmanager
def _traced(records: Records) -> Iterator[Timers]:
    """Timers whose trace is written at the end; when the run fails, its own error is the one to report."""
    timers = Timers()
    try:
        yield timers
    except BaseException:
        with suppress(InfraError):
            records.trace(timers.events())
        raise
    records.trace(timers.events())


def _total_steps(plan: Plan, loader: PromptLoader) -> int:
    """The horizon: what was asked for, at most what the epochs hold."""
    available = loader.steps_per_epoch * plan.trainer.total_epochs
    asked = plan.trainer.total_training_steps
    total = available if asked is None else min(asked, available)
    late = [step for step in plan.skip.steps if plan.skip.enable and step > total]
    if late:
        raise ConfigError(f"skip.rollout.steps has {late}, but the run ends at step {total}; drop them or train longer")
    if asked is not None and asked > available:
        log.warning(
            "trainer.total_training_steps=%d, but %d epochs of %d steps end at step %d; raise trainer.total_epochs",
            asked, plan.trainer.total_epochs, loader.steps_per_epoch, available,
        )  # fmt: skip
    return total


def _launch(plan: Plan, horizon: int, records: Records, sink: LineSink | None) -> Launcher:
    if plan.topology.launcher == "in_process":
        return InProcess(lambda rank: Worker(rank, plan, horizon), plan.topology.device, records.folder)
    from corral.workers.ray_launcher import RayLauncher  # ray is imported by runs that need it

    return RayLauncher(
        plan.topology,
        worker="corral.workers.worker:Worker",
        worker_args=(plan, horizon),
        run_dir=records.folder,
        preload=PRELOAD,
        wait=plan.trainer.cluster_wait,
        sink=sink,
    )


def _probe(train: PromptDataset) -> Batch:
    """A fixed stretch of real text: the start of the first prompt, its second half scored as the response."""
    ids = list(train[0].prompt_ids[:64])
    half = max(1, len(ids) // 2)
    return Batch.from_samples(
        [ids[:half]], [ids[half:] or ids[:1]], row=[0], sample_index=[0], group=[0], finish=["stop"]
    )
