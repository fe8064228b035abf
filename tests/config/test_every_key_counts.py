"""A key decides something in the plan, is reported with a reason, or has one value only. There is no fourth kind."""

from __future__ import annotations

from functools import cache

import pytest

from corral.config import generation
from corral.config.audit import NATIVE_ONE_VALUE, ONE_VALUE
from corral.config.compose import compose
from corral.config.derive import derive
from corral.config.influence import influence
from corral.config.overrides import parse
from corral.config.reasons import reasons_by_key
from corral.config.resolve import flatten, resolve
from corral.config.schema.root import leaves
from corral.config.unused import why_unused
from corral.errors import ConfigError
from corral.platform import CUDA
from tests.config.conftest import install

ARR = "actor_rollout_ref"
ACTOR = f"{ARR}.actor"
ROLLOUT = f"{ARR}.rollout"
CORRECTION = "algorithm.rollout_correction"

STATIC = [
    f"{ACTOR}.use_dynamic_bsz=False",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]
BASE = [
    "data.train_files=train.parquet",
    f"{ARR}.model.path=model",
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.use_dynamic_bsz=True",
    "trainer.device=cpu",
]
RUNS = {
    "ppo": [
        f"{ACTOR}.use_kl_loss=True",
        "trainer.n_gpus_per_node=4",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        f"{ACTOR}.checkpoint.save_contents=[hf_model]",
        "skip.rollout.enable=True",
        *(f"{role}.optim.lr_scheduler_type=cosine" for role in (ACTOR, "critic")),
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ],
    "static": [
        *STATIC,
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.use_pf_ppo=True",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=1",
        "trainer.val_only=True",
        "trainer.device=cuda",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.fallback=native",
    ],
    "grpo": [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=4",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k2",
        f"{CORRECTION}.rollout_rs_threshold=2",
    ],
    "bypass": [
        "trainer.device=npu",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=x",
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.loss_type=reinforce",
    ],
    "vllm": [
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=4",
        f"{ROLLOUT}.name=vllm",
    ],
    "own": [
        "algorithm.adv_estimator=my.estimators:mine",
        f"{ACTOR}.policy_loss.loss_mode=my.losses:mine",
        "reward.custom_reward_function.path=my.rewards",
    ],
}
"""Runs between which every key that can have an effect has one."""
CLUSTER = {"RAY_ADDRESS": "head:6379"}

REPORTED = {
    f"{ROLLOUT}.calculate_log_probs",
    f"{ACTOR}.fsdp_config.seed",
    f"{ARR}.ref.fsdp_config.seed",
    "critic.fsdp.use_torch_compile",
}
"""Known so that familiar command lines run, and reported whenever they are set."""

DECIDES_WHETHER_IT_RUNS = f"{ROLLOUT}.fallback"

OTHERS = {
    f"{ARR}.model.use_remove_padding": "False",
    "critic.model.use_remove_padding": "False",
    f"{ACTOR}.strategy": "megatron",
    "critic.strategy": "megatron",
    f"{ACTOR}.fsdp_config.fsdp_size": "2",
    f"{ARR}.ref.fsdp_config.fsdp_size": "2",
    "critic.fsdp.fsdp_size": "2",
    f"{ROLLOUT}.tensor_model_parallel_size": "2 trainer.nnodes=2",
    "reward.reward_manager.name": "dapo",
}


@cache
def everything() -> dict[str, dict[str, tuple[frozenset[str], str | None]]]:
    """Run → key → (fields it decides, why it has no effect)."""
    return {run: _of_run(run, keys) for run, keys in RUNS.items()}


def _of_run(run: str, keys: list[str]) -> dict[str, tuple[frozenset[str], str | None]]:
    with pytest.MonkeyPatch.context() as machine:
        install(machine, *(["vllm"] if run == "vllm" else []))
        machine.setattr(generation, "detect", lambda: CUDA)
        config, plain = compose(parse([*BASE, *keys]))
        values = flatten(plain)
        reasons = reasons_by_key(values, derive(config, CLUSTER))
        found = {key: influence(key, config, values, CLUSTER).fields - {"notices"} for key in leaves()}
        return {key: (found[key], why_unused(key, reasons, frozenset())) for key in leaves()}


@pytest.mark.parametrize("key", leaves())
def test_a_key_decides_something_is_reported_or_has_one_value(key):
    seen = [run[key] for run in everything().values()]
    if key in ONE_VALUE:
        assert not any(fields for fields, _ in seen)
    elif key in REPORTED:
        assert all(reason is not None for _, reason in seen)
    else:
        assert any(fields and reason is None for fields, reason in seen) or key == DECIDES_WHETHER_IT_RUNS


@pytest.mark.parametrize("key", NATIVE_ONE_VALUE)
def test_a_key_has_one_value_where_the_native_engine_generates(key):
    assert {run for run, found in everything().items() if found[key][0]} == {"vllm"}


def test_fallback_decides_whether_a_run_is_refused(monkeypatch):
    monkeypatch.setattr(generation, "detect", lambda: CUDA)
    config, plain = compose(parse([*BASE, *RUNS["static"]]))
    assert influence(DECIDES_WHETHER_IT_RUNS, config, flatten(plain), {}).refused


def test_a_key_that_nothing_derives_is_seen():
    """What the test above looks for: fsdp and fsdp2 are both accepted, and change nothing."""
    config, plain = compose(parse(BASE))
    found = influence(f"{ACTOR}.strategy", config, flatten(plain), {})
    assert (found.fields, found.refused) == (frozenset(), False)
    assert why_unused(f"{ACTOR}.strategy", reasons_by_key(flatten(plain), derive(config, {})), frozenset()) is None


@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_the_others_are_refused(plan_of, key, value):
    assert set(OTHERS) == {*ONE_VALUE, *NATIVE_ONE_VALUE}
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        plan_of(*f"{key}={value}".split())


def test_reasons_name_keys_that_exist(base):
    static = f"{ACTOR}.use_dynamic_bsz=False {ACTOR}.ppo_micro_batch_size_per_gpu=1".split()
    for keys in (
        [],
        [*static, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1"],
    ):
        config, plain = compose(parse([*base, *keys]))
        for name in reasons_by_key(flatten(plain), derive(config, {})):
            assert any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for key in leaves()), (
                name
            )


@pytest.mark.parametrize(
    ("key", "value", "others", "word"),
    [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "1", [], "token budget"),
        (f"{ACTOR}.kl_loss_coef", "0.1", [], "use_kl_loss=False"),
        (f"{ARR}.ref.fsdp_config.param_offload", "True", [], "no reference model"),
        ("algorithm.kl_ctrl.kl_coef", "0.1", [], "use_kl_in_reward=False"),
        (f"{ROLLOUT}.gpu_memory_utilization", "0.8", [], "vllm"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.x.y", "1", [], "vllm"),
        (f"{ROLLOUT}.val_kwargs.temperature", "0.5", [], "no validation"),
        ("data.seed", "3", ["data.shuffle=False"], "keep their order"),
        (f"{ACTOR}.optim.min_lr_ratio", "0.1", [], "constant"),
        (f"{ACTOR}.optim.num_cycles", "1", [f"{ACTOR}.optim.lr_scheduler_type=linear"], "cosine"),
        (f"{ARR}.model.override_config.attn_implementation", "eager", [], "engine"),
        (f"{ROLLOUT}.enforce_eager", "True", [], "cuda only"),
        ("trainer.cluster_wait", "5", [], "RAY_ADDRESS"),
        ("trainer.collective_check", "False", [], "single rank"),
        ("critic.fsdp.use_torch_compile", "True", [], "no log-probs"),
        (f"{ROLLOUT}.seed", "3", [f"{ROLLOUT}.do_sample=False"], "nothing is drawn"),
        ("reward.custom_reward_function.name", "mine", [], "path is not set"),
        ("skip.rollout.steps", "[1]", [], "enable=False"),
        ("trainer.resume_from_path", "global_step_1", [], "resume_mode=resume_path"),
        (f"{ACTOR}.checkpoint.save_contents", "[model]", [], "save_freq is off"),
        ("trainer.max_actor_ckpt_to_keep", "1", [], "save_freq is off"),
        ("trainer.max_critic_ckpt_to_keep", "1",
         ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.save_freq=1"], "no critic"),
        (f"{ROLLOUT}.fallback", "native", [], "requested engine runs"),
    ],
)  # fmt: skip
def test_set_without_effect(plan_of, key, value, others, word):
    found = {item.key: item for item in plan_of(*others, f"{key}={value}").unused}
    assert found[key.lstrip("+")].value == value
    assert word in found[key.lstrip("+")].reason


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        (f"{ACTOR}.kl_loss_coef", "0.1", [f"{ACTOR}.use_kl_loss=True"]),
        (f"{ARR}.ref.fsdp_config.param_offload", "True", ["algorithm.use_kl_in_reward=True"]),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", "2000",
         [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
          "critic.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True"]),
        (f"{ACTOR}.optim.min_lr_ratio", "0.1", [f"{ACTOR}.optim.lr_scheduler_type=cosine"]),
        ("data.seed", "3", []),
        ("reward.custom_reward_function.reward_kwargs.method", "flexible", []),
        (f"{ACTOR}.fsdp_config.param_offload", "True", []),
    ],
)  # fmt: skip
def test_set_with_effect_is_not_listed(plan_of, key, value, others):
    assert key not in {item.key for item in plan_of(*others, f"{key}={value}").unused}


def test_defaults_are_never_listed(base):
    keys = {argument.split("=")[0] for argument in base}
    assert {item.key for item in resolve(base, {}).plan.unused} <= keys


def test_a_seed_that_only_validation_draws_with_counts(plan_of, files):
    keys = [
        f"{ROLLOUT}.do_sample=False",
        f"{ROLLOUT}.seed=3",
        "trainer.test_freq=1",
        f"data.val_files={files}/test.parquet",
    ]
    drawn = [f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1.0"]
    assert f"{ROLLOUT}.seed" in {item.key for item in plan_of(*keys).unused}
    assert f"{ROLLOUT}.seed" not in {item.key for item in plan_of(*keys, *drawn).unused}
