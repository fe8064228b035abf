"""Real runs in this process: what they read of their plans, and what keys.json says became of every key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from corral.config import names
from corral.config.audit import NOT_APPLICABLE, NOT_NEEDED, REJECTED, UNREAD, USED, audit
from corral.config.influence import influence
from corral.config.plan import Plan
from corral.config.reads import forget, leaf_fields, merged, name_fields, reads
from corral.config.resolve import Resolved, flatten, resolve
from corral.config.schema.root import leaves
from corral.config.show import as_json
from corral.data.arithmetic import write_arithmetic
from corral.engine.packing import split
from corral.engine.tiny import write_tiny_model
from tests.config.conftest import install
from tests.plans import tiny_plan
from tests.trainer.runs import REWARDS, train_here

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

RUNS = {
    "ppo": [
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.use_pf_ppo=True",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_type=cosine",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "skip.rollout.enable=True",
        "skip.rollout.steps=[1]",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
    ],
    "grpo": [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=3",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=0.5_2",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=2",
    ],
    "bypass": [
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is=sequence",
        f"{ACTOR}.calculate_entropy=True",
        f"{ACTOR}.clip_ratio_c=2",
    ],
}
"""Between them they switch on everything that one process can do."""

_ALONE = "one rank: nothing is sharded and no cluster is joined"
_PLANNED = "settled while planning; for whoever reads plan.json"
_ONE_LOSS = "of a policy loss that none of the runs has"
UNREAD_FIELDS = {
    **dict.fromkeys((f"{role}.reshard_after_forward" for role in ("actor", "critic", "ref")), _ALONE),
    **dict.fromkeys(("trainer.cluster_wait", "trainer.collective_check"), _ALONE),
    **dict.fromkeys(("rollout.requested", "trainer.project_name", "trainer.experiment_name"), _PLANNED),
    **dict.fromkeys(("actor_update.optimizer_steps", "critic_update.optimizer_steps"), _PLANNED),
    "data.max_response_length": "the rollout has it as rollout.response_length",
    "ref.model.tokenizer_path": "text becomes tokens once, with the actor's tokenizer",
    "ref.seed": "the reference has no newly initialised weights",
    "actor.seed": "the actor has no newly initialised weights",
    **dict.fromkeys((f"actor_update.options.{name}" for name in ("tau_pos", "tau_neg", "kl_cov_ratio")), _ONE_LOSS),
    **dict.fromkeys((f"actor_update.options.{name}" for name in ("ppo_kl_coef", "dro_beta")), _ONE_LOSS),
    "notices": "printed",
    "unused": "printed",
    "memory": "printed",
}  # fmt: skip
"""Fields of a plan that none of these runs reads → why that is right."""


HANDED_ON = {
    *(f"algorithm.{name}" for name in names.ESTIMATOR_OPTIONS),  # to every estimator; test_names: who minds
    *(f"{ACTOR}.{name}" for name in names.LOSS_OPTIONS),  # to every policy loss, likewise
    f"{ACTOR}.data_loader_seed",  # to every loss with statistics of the mini-batch
    *(f"{role}.loss_scale_factor" for role in (ACTOR, "critic")),  # to every aggregation
    *(f"{role}.optim.min_lr_ratio" for role in (ACTOR, "critic")),  # to every schedule
    "algorithm.kl_ctrl.kl_coef",  # to the controller, which without a KL in the reward nobody asks
    f"{ACTOR}.calculate_entropy",  # or entropy_coeff: read first
    "trainer.resume_from_path",  # with resume_mode, to whoever looks for a checkpoint
    "skip.rollout.steps",  # compared with the horizon before skip.rollout.enable is
}
"""Keys without effect whose fields are read all the same: handed to something that ignores them."""


class Done:
    """A finished run: its keys.json, the fields it read, and its plan."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.keys: dict[str, dict[str, Any]] = json.loads((folder / "keys.json").read_text())
        self.reads = reads()
        self.resolved: Resolved = resolve(overrides)

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    def of_class(self, kind: str) -> Mapping[str, Any]:
        return {key: use for key, use in self.keys.items() if use["class"] == kind}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("audit")
    write_tiny_model(folder / "model", mean_length=8)
    write_arithmetic(folder / "data", seed=0, train=16, test=2)
    out = {}
    for name, keys in RUNS.items():
        overrides = [
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/test.parquet",
            "data.train_batch_size=4",
            "data.max_prompt_length=256",
            "data.max_response_length=12",
            f"actor_rollout_ref.model.path={folder}/model",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"reward.custom_reward_function.path={REWARDS}/varied_reward.py",
            "reward.num_workers=1",
            "trainer.device=cpu",
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={folder}/{name}",
            f"skip.rollout.dump_dir={folder}/dump",
            *keys,
        ]
        with pytest.MonkeyPatch.context() as machine:
            install(machine)  # nothing, as for the tests
            assert train_here(overrides) == 0
            out[name] = Done(folder / name, overrides)
    return out


@pytest.mark.parametrize("name", RUNS)
def test_every_key_is_in_one_class(runs, name):
    keys = runs[name].keys
    assert list(keys) == list(leaves())
    assert {use["class"] for use in keys.values()} == {USED, NOT_NEEDED, NOT_APPLICABLE, REJECTED}
    for use in keys.values():
        assert bool(use.get("by")) == (use["class"] == USED)
        assert bool(use.get("reason")) == (use["class"] != USED)


@pytest.mark.parametrize("name", RUNS)
def test_what_should_have_an_effect_was_read(runs, name):
    assert {
        key: use["reason"] for key, use in runs[name].keys.items() if use.get("reason", "").startswith(UNREAD)
    } == {}


@pytest.mark.parametrize("name", RUNS)
def test_set_without_effect_is_what_the_plan_said(runs, name):
    said = {item.key: item.reason for item in runs[name].plan.unused}
    assert {key: use["reason"] for key, use in runs[name].of_class(NOT_APPLICABLE).items()} == said


@pytest.mark.parametrize("name", RUNS)
def test_a_key_without_effect_decides_nothing_that_was_read(runs, name):
    """The reasons of the plan against the reads of the run: neither knows of the other."""
    done = runs[name]
    resolved, values = done.resolved, flatten(done.resolved.config)
    without = {**done.of_class(NOT_NEEDED), **done.of_class(NOT_APPLICABLE)}
    decided = {key: influence(key, resolved.typed, values, resolved.environ).fields for key in without}
    read = {key: sorted(fields & done.reads.keys()) for key, fields in decided.items()}
    assert {key for key, fields in read.items() if fields} - HANDED_ON == set(), name


def test_readers_are_the_modules_that_read(runs):
    keys = runs["ppo"].keys
    assert keys[f"{ACTOR}.optim.betas"]["by"] == ["corral.engine.optim"]
    assert keys[f"{ACTOR}.optim.betas"]["plan"] == ["actor.optim.betas"]
    assert keys["data.truncation"]["by"] == ["corral.data.prompts"]
    assert "critic_update.epochs" in keys[f"{ACTOR}.ppo_epochs"]["plan"]  # which the critic inherits


def test_every_field_of_a_plan_is_read_by_some_run(runs):
    fields = set().union(*(leaf_fields(done.plan) for done in runs.values()))
    read = set().union(*(done.reads for done in runs.values()))
    assert fields - read - set(UNREAD_FIELDS) == set()
    assert set(UNREAD_FIELDS) & read == set()


def test_a_field_that_nobody_reads_is_seen():
    plan = tiny_plan()
    name_fields(plan)
    forget()
    assert plan.actor.seed == plan.critic.seed  # a test is no part of the run
    assert as_json(plan)
    assert reads() == {}
    assert plan.actor.train is not None
    assert split([3, 4], dp=2, limits=copy(plan.actor.train)).shares  # as another process gets it
    assert reads() == {f"actor.train.{name}": {"corral.engine.packing"} for name in ("token_budget", "samples")}


def test_reads_of_several_processes_add_up():
    assert merged({"a": {"x"}, "b": {"x"}}, {}, {"a": {"y"}}) == {"a": {"x", "y"}, "b": {"x"}}


def test_an_audit_without_reads_finds_every_key_unread(runs):
    uses = audit(runs["ppo"].resolved, {})
    by_reads = {key for key, use in runs["ppo"].keys.items() if use.get("plan")}
    assert by_reads
    assert all(uses[key].reason.startswith(UNREAD) for key in by_reads)
