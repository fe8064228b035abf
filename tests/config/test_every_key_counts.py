"""A key is read into the plan, reported as unused with a reason, or accepts one value only. There is no fourth kind."""

from __future__ import annotations

import pytest

from corral.config.compose import compose
from corral.config.derive import derive
from corral.config.overrides import parse
from corral.config.resolve import flatten, resolve
from corral.config.schema.root import leaves
from corral.config.section import read_keys
from corral.config.unused import reasons_by_key
from corral.errors import ConfigError

ARR = "actor_rollout_ref"
ACTOR = f"{ARR}.actor"
ROLLOUT = f"{ARR}.rollout"

ONE_VALUE = {
    f"{ARR}.model.use_remove_padding": "False",
    "critic.model.use_remove_padding": "False",
    f"{ACTOR}.strategy": "megatron",
    "critic.strategy": "megatron",
    f"{ACTOR}.fsdp_config.fsdp_size": "2",
    f"{ARR}.ref.fsdp_config.fsdp_size": "2",
    "critic.fsdp.fsdp_size": "2",
    "algorithm.kl_ctrl.type": "adaptive",
    "reward.reward_manager.name": "dapo",
    "trainer.resume_mode": "auto",
}


def read_by(base: list[str], *overrides: str) -> set[str]:
    config, _ = compose(parse([*base, *overrides]))
    assert read_keys(config) == set()
    derive(config, {})
    return read_keys(config)


def test_every_key_is_read_or_takes_one_value(base):
    read = read_by(base, f"{ACTOR}.use_kl_loss=True")
    read |= read_by(base, "trainer.device=cuda", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.fallback=native")
    config, plain = compose(parse(base))
    reasons = reasons_by_key(flatten(plain), derive(config, {}))
    never_read = set(leaves()) - read - set(ONE_VALUE)
    assert {key for key in never_read if key not in reasons} == set()


@pytest.mark.parametrize(("key", "value"), ONE_VALUE.items())
def test_the_others_are_refused(plan_of, key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        plan_of(f"{key}={value}")


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
        ("trainer.cluster_wait", "5", [], "RAY_ADDRESS"),
        ("critic.fsdp.use_torch_compile", "True", [], "no log-probs"),
        (f"{ROLLOUT}.seed", "3", [f"{ROLLOUT}.do_sample=False"], "nothing is drawn"),
        ("reward.custom_reward_function.name", "mine", [], "path is not set"),
        ("skip.rollout.steps", "[1]", [], "enable=False"),
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
