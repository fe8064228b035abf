"""Saved weights: model folders that transformers opens, equal to what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.trainer.runs import Inputs, metrics, samples, train_here, weights


@pytest.fixture(scope="module")
def run_dir(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps at a large learning rate, saved at steps 2 and 3."""
    folder = tmp_path_factory.mktemp("export") / "run"
    more = ["trainer.total_training_steps=3", "trainer.save_freq=2", "reward.num_workers=1"]
    lr = ["actor_rollout_ref.actor.optim.lr=1e-3", "critic.optim.lr=1e-3"]
    assert train_here(inputs.overrides(folder, *more, *lr)) == 0
    return folder


def test_saved_every_other_step_and_at_the_end(run_dir: Path):
    assert sorted(path.name for path in run_dir.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert not torch.equal(*(weights(run_dir, step, "actor")["lm_head.weight"] for step in (2, 3)))


@pytest.mark.parametrize(
    ("role", "auto"), [("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)]
)
def test_transformers_opens_it(run_dir: Path, role: str, auto: type):
    folder = run_dir / "global_step_3" / role / "huggingface"
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    saved = weights(run_dir, 3, role)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], tokenize=False)


def test_the_saved_critic_gives_the_values_that_were_logged(run_dir: Path):
    """Values of step 3 are those of the weights saved at step 2."""
    folder = run_dir / "global_step_2" / "critic" / "huggingface"
    critic = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager").eval()
    for row in samples(run_dir, 3):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            values = critic(ids).logits[0, :, 0]
        first = len(row["prompt_ids"]) - 1
        predicted = values[first : first + len(row["response_ids"])]
        assert torch.allclose(predicted, torch.tensor(row["values"]), atol=1e-4)


def test_training_goes_on_from_a_saved_folder(inputs: Inputs, run_dir: Path, tmp_path: Path):
    """Given as the models of a new run, they continue: on the same data the values are those of the old critic."""
    saved = [f"{role}={run_dir}/global_step_3/{name}/huggingface" for role, name in ROLES]
    assert train_here(inputs.overrides(tmp_path / "on", "reward.num_workers=1", *saved)) == 0
    (step,) = metrics(tmp_path / "on")
    assert step["actor/pg_loss"] != metrics(run_dir)[0]["actor/pg_loss"]
    assert step["critic/values/mean"] != metrics(run_dir)[0]["critic/values/mean"]


ROLES = (("actor_rollout_ref.model.path", "actor"), ("critic.model.path", "critic"))
