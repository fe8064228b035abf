"""The memory in the plan against numbers counted by hand; weight files are made by the library that defines them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from corral.config.memory import Sizes, folder_sizes
from corral.config.show import render
from tests.config.conftest import install

EMBED, LAYER, HEAD = 100 * 8, 8 * 8, 100 * 8


@pytest.fixture
def weights():
    return {
        "model.embed_tokens.weight": torch.zeros(100, 8),
        "model.layers.0.mlp.weight": torch.zeros(8, 8),
        "lm_head.weight": torch.zeros(100, 8),
    }


def test_one_file_and_an_index_count_alike(files, weights):
    folder = files / "model"
    assert folder_sizes(folder) is None
    save_file(weights, folder / "model.safetensors")
    assert folder_sizes(folder) == Sizes(EMBED + LAYER + HEAD, HEAD)
    (folder / "model.safetensors").unlink()
    names = list(weights)
    parts = {"a.safetensors": names[:1], "b.safetensors": names[1:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    save_file(weights, folder / "consolidated.safetensors")  # not in the index: the same weights under other names
    index = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert folder_sizes(folder) == Sizes(EMBED + LAYER + HEAD, HEAD)


def test_a_tied_head_is_no_parameter_of_its_own(files, weights):
    config = json.loads((files / "model" / "config.json").read_text())
    (files / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file(weights, files / "model" / "model.safetensors")
    assert folder_sizes(files / "model") == Sizes(EMBED + LAYER, 0)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x04" + b"\0" * 7 + b"half"])
def test_a_broken_file_is_left_to_the_engine(plan_of, files, content):
    (files / "model" / "model.safetensors").write_bytes(content)
    assert plan_of().memory == ()
    assert "not known" in render(plan_of())


def test_alone_a_rank_holds_everything_once(plan_of, files, weights):
    save_file(weights, files / "model" / "model.safetensors")
    actor, critic = plan_of().memory
    whole, body = 4 * (EMBED + LAYER + HEAD), 4 * (EMBED + LAYER)
    assert (actor.role, actor.weights, actor.gradients, actor.optimizer) == ("actor", whole, whole, 2 * whole)
    assert (critic.role, critic.weights, critic.gradients, critic.optimizer) == ("critic", body, body, 2 * body)


def test_a_world_shares_weights_and_moments_and_copies_the_rollout(plan_of, files, weights):
    save_file(weights, files / "model" / "model.safetensors")
    plan = plan_of(
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float64",
        "actor_rollout_ref.actor.fsdp_config.dtype=float64",
    )
    actor, critic, ref, rollout = plan.memory
    whole = 8 * (EMBED + LAYER + HEAD)
    assert (actor.weights, actor.gradients, actor.optimizer) == (whole // 4, whole, whole // 2)
    assert critic.parameters == EMBED + LAYER
    assert (ref.role, ref.weights, ref.gradients, ref.optimizer) == ("ref", whole // 4, 0, 0)
    assert (rollout.role, rollout.weights, rollout.gradients, rollout.optimizer) == ("rollout", whole, 0, 0)
    body = 4 * (EMBED + LAYER)  # the critic stays in float32
    # Actor and critic with two moments each, reference, copy, and the gradients of the larger of those that train.
    held = (whole + 2 * whole + body + 2 * body + whole) // 4 + whole + whole
    assert plan.rank_memory == plan.as_dict()["rank_memory"] == held
    assert plan.as_dict()["memory"][0]["parameters"] == EMBED + LAYER + HEAD
    assert "a node, before activations" in render(plan)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_of_a_replica_of_vllm_holds_its_part(plan_of, files, weights, monkeypatch, dtype, size, tp):
    """Also alone in the world: vllm's weights are its own."""
    install(monkeypatch, "vllm")
    save_file(weights, files / "model" / "model.safetensors")
    rollout = "actor_rollout_ref.rollout"
    keys = [f"{rollout}.name=vllm", f"{rollout}.dtype={dtype}", f"{rollout}.tensor_model_parallel_size={tp}"]
    copy = plan_of(*keys, f"trainer.n_gpus_per_node={tp}").memory[-1]
    assert (copy.role, copy.weights, copy.gradients, copy.optimizer) == (
        "rollout",
        size * (EMBED + LAYER + HEAD) // tp,
        0,
        0,
    )
