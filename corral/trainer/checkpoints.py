"""Checkpoints of a run: global_step_N with a folder for each trained role, and trainer.json for what the driver holds.

Random streams are keyed by step and data row, so position in the data, KL coefficient and counters are all there is to
keep beside the models. A folder appears when it is whole; the file that names the newest is written after it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from corral import atomic
from corral.config.checkpoints import FORMAT, LATEST, PREFIX, STATE, Checkpoint, latest, resumable, steps_on_disk
from corral.config.plan import Plan
from corral.data.loader import PromptLoader
from corral.errors import ConfigError, DataError, InfraError
from corral.rollout.fingerprint import files_digest
from corral.trainer.kl_coefficient import KLCoefficient
from corral.workers.group import WorkerGroup

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is: the last finished step, and how many in a row up to it skipped a non-finite gradient."""

    step: int = 0
    non_finite: int = 0

    def finish(self, step: int, *, skipped: int) -> None:
        """skipped: optimizer steps of this iteration that were left out."""
        self.step = step
        self.non_finite = self.non_finite + 1 if skipped else 0


class Checkpoints:
    """Saves and restores one run, under trainer.default_local_dir."""

    def __init__(
        self, plan: Plan, loader: PromptLoader, kl_coefficient: KLCoefficient, progress: Progress, total_steps: int
    ) -> None:
        self._plan = plan
        self._loader = loader
        self._kl_coefficient = kl_coefficient
        self._progress = progress
        self._total_steps = total_steps
        self._folder = Path(plan.trainer.checkpoint_dir)
        self._roles = ["actor"] if plan.critic is None else ["actor", "critic"]

    # Saving --------------------------------------------------------------------------------------------------------

    def save(self, group: WorkerGroup) -> None:
        """Write the checkpoint of the last finished step, in place of an older one of that step.

        Raises InfraError when it cannot be written; earlier checkpoints are as before then.
        """
        contents, step = self._plan.trainer.save_contents, self._progress.step
        target = self._folder / f"{PREFIX}{step}"
        atomic.sweep(self._folder, f"{PREFIX}*")
        with atomic.undone_on_failure(target, lambda: None), atomic.new_folder(target) as fresh:
            try:
                for role in self._roles:
                    group.save(role, str(fresh / role), contents)
                    if not (fresh / role).is_dir():
                        raise InfraError(
                            f"rank 0 wrote {fresh / role}, which is not there on the driver's node; "
                            "trainer.default_local_dir has to lie on a file system that all nodes share"
                        )
                atomic.write_text(fresh / STATE, json.dumps(self._state(), indent=2))
            except InfraError as error:  # named as the user will look for it
                raise InfraError(str(error).replace(str(fresh), str(target))) from error
        if resumable(contents):
            atomic.write_text(self._folder / LATEST, str(step))
        self._prune()

    def _state(self) -> dict[str, Any]:
        """The content of trainer.json: all plain data."""
        contents = self._plan.trainer.save_contents
        state = {
            "format": FORMAT,
            "global_step": self._progress.step,
            "contents": list(contents),
            "roles": self._roles,
        }
        if "extra" in contents:
            state |= {
                "loader": self._loader.state_dict(),
                "data": self._data,
                "total_steps": self._total_steps,
                "kl_coefficient": self._kl_coefficient.value,
                "non_finite": self._progress.non_finite,
            }
        return state

    def _prune(self) -> None:
        """Remove parts beyond the number to keep, of this step and those before: later ones are of another branch."""
        trainer = self._plan.trainer
        saved = [folder for step, folder in steps_on_disk(self._folder).items() if step <= self._progress.step]
        going_on = self._folder / f"{PREFIX}{latest(self._folder)}"  # this one, unless nothing can go on from it
        for role in self._roles:
            limit = trainer.max_actor_ckpt_to_keep if role == "actor" else trainer.max_critic_ckpt_to_keep
            for folder in saved[:-limit] if limit else ():
                if folder != going_on:
                    atomic.remove_folder(folder / role)
        for folder in saved[:-1]:
            if not any((folder / role).exists() for role in self._roles):
                atomic.remove_folder(folder)

    # Going on ------------------------------------------------------------------------------------------------------

    def restore_driver(self, found: Checkpoint) -> None:
        """Take the driver's part of a checkpoint. ConfigError, DataError: this run cannot go on from it."""
        state, roles = found.state, found.state["roles"]
        if roles != self._roles:
            raise ConfigError(
                f"{found.folder} was saved with {' and '.join(roles)} and this run trains "
                f"{' and '.join(self._roles)}; use the algorithm.adv_estimator and critic.enable it was saved with, or "
                "set trainer.resume_mode=disable"
            )
        try:
            data, total_steps = state["data"], state["total_steps"]
            self._kl_coefficient.value = float(state["kl_coefficient"])
            self._progress.non_finite = int(state["non_finite"])
            if data != self._data:
                raise DataError(
                    f"{found.folder}: data.train_files were others when it was saved (digest {data[:12]}, now "
                    f"{self._data[:12]}); give those, or set trainer.resume_mode=disable"
                )
            self._loader.load_state_dict(state["loader"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{found.folder / STATE} is not that of a checkpoint ({error!r})") from error
        self._progress.step = found.step
        if total_steps != self._total_steps:
            log.warning(
                "the run ended at step %s when %s was saved and ends at step %d now: a learning rate with a schedule "
                "changes at this point",
                total_steps, found.folder.name, self._total_steps,
            )  # fmt: skip

    def restore_workers(self, group: WorkerGroup, found: Checkpoint) -> None:
        """Give the models their part. Raises DataError when it is damaged or of another model."""
        for role in self._roles:
            group.load(role, str(found.folder / role))
        log.info("resumed from %s: step %d of %d is next", found.folder, found.step + 1, self._total_steps)

    @cached_property
    def _data(self) -> str:
        return files_digest(self._plan.data.train_files)
