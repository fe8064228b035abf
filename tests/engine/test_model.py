"""What a model folder and its overrides may be; everything else is refused in one line that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    FalconMambaConfig,
    Gemma2Config,
    GPT2Config,
    Lfm2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from corral.engine.model import build_model, refuse_config, refuse_modules
from corral.engine.rank import Rank
from corral.errors import ConfigError, CorralError, DataError
from tests.engine.small import engine_plan


def refusal(path: Path, error: type[CorralError], **changes: Any) -> str:
    with pytest.raises(error) as caught:
        build_model(engine_plan(path, **changes), Rank())
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none", DataError).startswith("actor_rollout_ref.model.path: model folder ")
    assert refusal(tmp_path / "none", DataError, role="critic").startswith("critic.model.path: model folder ")


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path, DataError)
    config = tmp_path / "config.json"
    config.write_text("{not json")
    assert "is not valid JSON" in refusal(tmp_path, DataError)
    config.write_text("[1]")
    assert "names no model_type" in refusal(tmp_path, DataError)
    config.write_text('{"model_type": "nothing-we-know"}')
    assert "nothing-we-know" in refusal(tmp_path, DataError)


def test_folder_without_weights(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(models["qwen3"] / "config.json", tmp_path)
    assert "cannot load" in refusal(tmp_path, DataError)


def test_truncated_weights(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "cannot load" in refusal(tmp_path / "cut", DataError)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_checkpoint_that_lacks_weights(role: str, models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "lacks 1 weights" in refusal(tmp_path / "part", DataError, role=role)


def test_a_checkpoint_of_another_size(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 64}))
    assert "other" in refusal(tmp_path / "other", DataError)


def test_overrides(models: dict[str, Path]) -> None:
    model = build_model(engine_plan(models["qwen3"], override_config={"rms_norm_eps": 0.5}), Rank())
    assert model.config.rms_norm_eps == 0.5
    assert model.model.norm.variance_epsilon == 0.5
    message = refusal(models["qwen3"], ConfigError, override_config={"rms_norm_epz": 0.5})
    assert message == "override_config.rms_norm_epz is not a field of Qwen3Config; did you mean rms_norm_eps?"
    assert "attn_implementation" in refusal(
        models["qwen3"], ConfigError, override_config={"attn_implementation": "eager"}
    )


def test_heads_have_to_divide(models: dict[str, Path]) -> None:
    assert refusal(models["qwen3"], ConfigError, sp=3).startswith("actor: 4 attention heads cannot be split")


def test_dropout_is_refused_in_training_only(models: dict[str, Path]) -> None:
    override = {"attention_dropout": 0.1}
    assert "attention_dropout=0" in refusal(models["qwen3"], ConfigError, override_config=override)
    build_model(engine_plan(models["qwen3"], "ref", train=None, optim=None, override_config=override), Rank())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MistralConfig(sliding_window=64), "sliding_window=64"),
        (Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding_attention layers"),
        (Gemma2Config(layer_types=["full_attention"] * 26, sliding_window=None), "attn_logit_softcapping=50"),
        (Qwen3NextConfig(), "linear_attention layers"),
        (Lfm2Config(full_attn_idxs=[1]), "conv layers"),
        (BartConfig(), "encoder-decoder"),
    ],
    ids=["mistral", "qwen3 with window", "gemma 2", "qwen3 next", "lfm2", "bart"],
)
def test_models_the_path_does_not_implement_are_refused_by_name(config: PreTrainedConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        refuse_config(config, training=True)
    assert config.model_type in str(caught.value)


def test_models_that_mix_tokens_outside_attention_are_refused_by_module() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FalconMambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=32))
    with pytest.raises(ConfigError, match="FalconMamba"):
        refuse_modules(model, training=False)


def test_other_dropout_is_refused_in_training() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    refuse_modules(model, training=False)
    with pytest.raises(ConfigError, match=r"drops out with p=0\.1"):
        refuse_modules(model, training=True)


def test_a_new_value_head_depends_on_the_seed_alone(models: dict[str, Path]) -> None:
    def head(seed: int, dtype: str, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        model = build_model(engine_plan(models["qwen3"], "critic", seed=seed, dtype=dtype), Rank())
        assert model.dropout.p == 0.0
        assert model.score.out_features == 1
        assert not model.score.bias.any()
        return model.score.weight.detach().float()

    assert torch.equal(head(1, "float32", 0), head(1, "float64", 99))
    assert not torch.equal(head(1, "float32", 0), head(2, "float32", 0))


def test_master_dtype_and_private_attention(models: dict[str, Path]) -> None:
    model = build_model(engine_plan(models["llama"], dtype="bfloat16"), Rank())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(models["llama"])._attn_implementation != model.config._attn_implementation
