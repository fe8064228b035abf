"""The tiny model: loads like any model folder, the same for the same seed, ends its responses at many lengths."""

import argparse
import hashlib
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, DynamicCache

from corral.data.arithmetic import arithmetic_rows
from corral.engine.commands import add_parsers
from corral.engine.tiny import write_tiny_model
from corral.errors import DataError, InfraError

SMALL = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1}
CAP = 128


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("models") / request.param
    assert write_tiny_model(out, architecture=request.param) is True
    return out


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_it_loads_as_policy_and_as_critic(folder) -> None:
    policy = AutoModelForCausalLM.from_pretrained(folder)
    assert policy.config.model_type == folder.name
    assert policy.dtype == torch.float32
    assert 1e6 < sum(p.numel() for p in policy.parameters()) < 6e6
    assert policy.lm_head.weight.data_ptr() != policy.get_input_embeddings().weight.data_ptr()
    assert policy.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    critic = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    assert critic(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 1)


def test_the_tokenizer_reads_digit_by_digit_and_gives_any_text_back(folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("12 + 345")[-3:] == ["3", "4", "5"]
    for text in ("Anna has 123 apples.\n#### 1,024", "äöü 你好  two spaces\t\n", "<b> #### -5"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_chat_template_is_chatml(folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    prompted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompted == text + "<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [tokenizer.decode(i) for i in ids].count("<|im_start|>") == 3
    problems = arithmetic_rows(seed=0, train=64, test=1)["train"]
    lengths = [len(tokenizer.apply_chat_template(row["prompt"], return_dict=False)) for row in problems]
    assert max(lengths) < 200


def response_lengths(folder: Path, seed: int, samples: int) -> list[int]:
    """Lengths under plain sampling, the end token counted; CAP where it did not come."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chats = [row["prompt"] for row in arithmetic_rows(seed=seed, train=samples, test=1)["train"]]
    random = torch.Generator().manual_seed(seed)
    lengths = torch.full((samples,), CAP)
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True, padding_side="left"
    )
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    name = next(key for key in signature(model.forward).parameters if key in ("cache", "past_key_values"))  # by version
    cache = {name: DynamicCache(config=model.config)}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for step in range(CAP):
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **cache)
            ids = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=random)
            ended = (ids[:, 0] == tokenizer.eos_token_id) & (lengths == CAP)
            lengths[ended] = step + 1
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = positions[:, -1:] + 1
    return lengths.tolist()


def test_responses_end_at_many_lengths(folder) -> None:
    lengths = response_lengths(folder, seed=1, samples=48)
    assert 30 <= sum(lengths) / len(lengths) <= 80
    for start in range(0, 48, 16):
        assert len(set(lengths[start : start + 16])) >= 8
    assert sum(length == 1 for length in lengths) <= 5
    assert 0 < sum(length == CAP for length in lengths) < 18


def test_another_process_writes_the_same_files_and_another_seed_other_weights(tmp_path) -> None:
    write_tiny_model(tmp_path / "here", seed=3, **SMALL)
    code = (
        "import sys; from pathlib import Path; from corral.engine.tiny import write_tiny_model; "
        f"write_tiny_model(Path(sys.argv[1]), seed=3, **{SMALL!r})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=120, capture_output=True)
    write_tiny_model(tmp_path / "other", seed=4, **SMALL)
    here, other = contents(tmp_path / "here"), contents(tmp_path / "other")
    assert contents(tmp_path / "there") == here
    assert {name for name in here if here[name] != other[name]} == {"model.safetensors", "corral_recipe.json"}


def test_writing_does_not_disturb_the_random_numbers_of_the_caller(tmp_path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    write_tiny_model(tmp_path / "a", **SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_an_existing_folder_is_left_alone_refused_or_replaced(tmp_path) -> None:
    out = tmp_path / "model"
    assert write_tiny_model(out, **SMALL) is True
    before = contents(out)
    assert write_tiny_model(out, **SMALL) is False
    with pytest.raises(DataError, match=r"exists and is not this model.*--force"):
        write_tiny_model(out, seed=1, **SMALL)
    assert contents(out) == before
    assert write_tiny_model(out, seed=1, force=True, **SMALL) is True
    assert contents(out)["model.safetensors"] != before["model.safetensors"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="exists"):
        write_tiny_model(mine, **SMALL)
    assert (mine / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert write_tiny_model(tmp_path / "empty", **SMALL) is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine", "model"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tiny_model(tmp_path / "model", **SMALL)
    assert list(tmp_path.iterdir()) == []


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    return parser.parse_args(["model", "tiny", *arguments])


def test_the_command_reports_what_it_did(tmp_path, capsys) -> None:
    args = parse(str(tmp_path / "m"), "--architecture", "llama", "--seed", "2")
    assert args.run(args) == 0
    assert args.run(args) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'm'}: written\n{tmp_path / 'm'}: already there, left alone\n"
    assert said.err == ""
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config.model_type == "llama"


def test_an_unknown_architecture_is_one_line(tmp_path) -> None:
    with pytest.raises(DataError, match="'gpt2' is unknown; choose one of qwen3, llama"):
        write_tiny_model(tmp_path / "m", architecture="gpt2")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path) -> None:
    (tmp_path / "taken").write_text("")
    args = parse(str(tmp_path / "taken" / "model"))
    with pytest.raises(InfraError, match=r"cannot write .*taken/model: "):
        args.run(args)
