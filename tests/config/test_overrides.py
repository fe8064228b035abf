"""Spelling and quoting: each mistake is one line that shows the argument and how to write it."""

from __future__ import annotations

import contextlib
import io
import shlex
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.config.overrides import parse
from corral.config.resolve import resolve
from corral.config.schema.root import leaves
from corral.errors import ConfigError
from corral.exits import run_command

ARR = "actor_rollout_ref"


def refused(*arguments: str) -> str:
    """The one line that refuses these arguments."""
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, {})
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.nnode", "trainer.nnodes"),
        (f"{ARR}.actor.ppo_minibatch_size", f"{ARR}.actor.ppo_mini_batch_size"),
        (f"{ARR}.actor.lr", f"{ARR}.actor.optim.lr"),
        ("actor.optim.lr", f"{ARR}.actor.optim.lr"),
        ("critic.ulysses_sequence_parallel", "critic.ulysses_sequence_parallel_size"),
        ("data.train_batch_size.x", "data.train_batch_size"),
        (f"{ARR}.rollout.engine_kwarg.vllm.x", f"{ARR}.rollout.engine_kwargs"),
    ],
)
def test_unknown_key_names_the_nearest(prefix, key, nearest):
    line = refused(f"{prefix}{key}=1")
    assert repr(key) in line
    assert repr(nearest) in line


@pytest.mark.parametrize("block", ["engine_kwargs.vllm", "engine_kwargs.vllm.deep.er"])
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_open_blocks_take_any_key(base, prefix, block):
    config = resolve([*base, f"{prefix}{ARR}.rollout.{block}.new=[1,2]"], {}).config
    node = config[ARR]["rollout"]
    for part in [*block.split("."), "new"]:
        node = node[part]
    assert node == [1, 2]


def test_an_open_block_can_be_given_whole(base, plan_of):
    plan = plan_of("reward.custom_reward_function.reward_kwargs={low: 0.5}", "+reward.custom_reward_function.path=m.n")
    assert plan.reward.reward_kwargs == {"low": 0.5}
    plan = plan_of("+actor_rollout_ref.model.override_config.rope_theta=5e5")
    assert plan.actor.model.override_config == {"rope_theta": 5e5}


def test_a_known_key_may_carry_plus(plan_of):
    assert plan_of("+trainer.total_training_steps=7", "++trainer.nnodes=2").topology.nnodes == 2


@pytest.mark.parametrize(
    "value", ["/a=b", "/a(b", "/a,b", "~/model", "a=b=c", "x, y", "-->(", '/say "hi"=', "a\\b=", '\\"=', "=\\"]
)
def test_a_value_the_grammar_refuses_is_shown_with_quotes_that_work(value):
    key = "trainer.experiment_name"
    line = refused(f"{key}={value}")
    assert repr(f"{key}={value}") in line
    (word,) = shlex.split(line[line.rindex(f"'{key}=\"") :])
    (override,) = parse([word])
    assert override.value == value


def test_a_comma_offers_a_list_too():
    assert "'trainer.logger=[console,file]'" in refused("trainer.logger=console,file")


@pytest.mark.parametrize("argument", ["trainer.seeds=choice(1,2)", "data.seed=range(1,3)", "data.seed=choice(1,2)"])
def test_sweeps_are_not_values(argument):
    refused(argument)


def test_a_list_the_shell_split_in_two():
    line = refused("trainer.logger=[console,", "file]")
    assert "'trainer.logger=[first, second]'" in line
    assert "is not key=value" in refused("file]")


def test_a_scalar_for_a_list_shows_the_list():
    assert refused("skip.rollout.steps=1") == (
        "skip.rollout.steps=1: expected a list of whole numbers; write 'skip.rollout.steps=[1]'"
    )


@pytest.mark.parametrize("argument", ["--help", "-h", "--json", "~trainer.nnodes", "trainer", "=1", ""])
def test_what_is_not_an_override(argument):
    line = refused(argument)
    if argument not in ("=1", ""):
        assert repr(argument) in line


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("trainer.nnodes=two", "expected a whole number"),
        ("trainer.nnodes=1.5", "expected a whole number"),
        ("trainer.nnodes=null", "expected a whole number"),
        (f"{ARR}.actor.optim.lr=small", "expected a number"),
        ("data.shuffle=maybe", "expected True or False"),
        ("critic.enable=maybe", "expected True or False or null"),
        ("trainer.total_training_steps=ten", "expected a whole number or null"),
        ("skip.rollout.steps=[one]", "expected a list of whole numbers"),
        (f"{ARR}.rollout.engine_kwargs=3", "expected a mapping"),
        ("trainer.project_name=[a]", "expected text"),
        ("trainer.device=${nowhere}", "nowhere"),
    ],
)
def test_wrong_types(base, argument, said):
    line = refused(*base, argument)
    assert said in line
    assert argument.split("=")[0] in line


def test_a_section_is_not_a_key():
    assert "critic.enable=" in refused("critic=3")


@pytest.mark.parametrize("key", ["trainer.v1.trainer_mode", f"{ARR}.model.lora_rank", "ray_kwargs.ray_init.num_cpus"])
def test_familiar_keys_this_version_lacks_are_not_called_misspelled(key):
    assert "not available in this version" in refused(f"{key}=1")


@pytest.mark.parametrize("role", [f"{ARR}.actor.ppo", "critic.ppo", f"{ARR}.rollout.log_prob", f"{ARR}.ref.log_prob"])
def test_global_micro_batch_sizes_name_the_key_per_device(role):
    assert f"set {role}_micro_batch_size_per_gpu instead" in refused(f"{role}_micro_batch_size=8")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_any_text_is_parsed_or_refused_in_one_line(text):
    for argument in (text, f"trainer.experiment_name={text}"):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = run_command(partial(_parsed, argument))
        assert (code, len(said.getvalue().splitlines())) in ((0, 0), (78, 1)), said.getvalue()


def _parsed(argument: str) -> int:
    parse([argument])
    return 0


def test_every_key_is_documented():
    assert all(leaf.doc.endswith((".", ")")) for leaf in leaves().values())
