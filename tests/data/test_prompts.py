"""Prompts: straight from the chat template, the length cap in every mode, and one clear line for every bad file."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from corral.config.plan import DataPlan
from corral.data.arithmetic import arithmetic_rows
from corral.data.prompts import PromptDataset
from corral.engine.tiny import write_tiny_model
from corral.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, hidden_size=32, layers=1, heads=1, kv_heads=1)
    return AutoTokenizer.from_pretrained(folder)


def plan(**changes: Any) -> DataPlan:
    return DataPlan(
        **{
            "train_files": (),
            "val_files": (),
            "prompt_key": "prompt",
            "train_batch_size": 4,
            "max_prompt_length": 512,
            "max_response_length": 16,
            "truncation": "error",
            "filter_overlong_prompts": False,
            "shuffle": False,
            "seed": 0,
            "train_max_samples": -1,
            "val_max_samples": -1,
            "apply_chat_template_kwargs": {},
            **changes,
        }
    )


def row(content: str = "What is 1 + 1?", **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "corral/arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
        **changes,
    }


def write(file: Path, rows: list[Any]) -> str:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(file)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_rows_of_every_format_become_the_tokens_of_the_rendered_template(tmp_path, tokenizer, suffix) -> None:
    rows = arithmetic_rows(seed=0, train=6, test=1)["train"]
    dataset = PromptDataset([write(tmp_path / f"data{suffix}", rows)], plan(), tokenizer)
    assert len(dataset) == 6
    for index, source in enumerate(rows):
        prompt = dataset[index]
        text = f"<|im_start|>user\n{source['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert list(prompt.prompt_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (prompt.row, prompt.data_source) == (index, "corral/arithmetic")
        assert prompt.ground_truth == source["reward_model"]["ground_truth"]
        assert prompt.extra_info == source["extra_info"]
        assert prompt.chat == source["prompt"]


def test_a_batch_equals_its_prompts_one_by_one_and_rows_run_over_all_files(tmp_path, tokenizer) -> None:
    files = [write(tmp_path / f"{n}.jsonl", [row(f"file {n} row {i} " + "x" * i) for i in range(3)]) for n in range(2)]
    dataset = PromptDataset(files, plan(), tokenizer)
    batch = dataset.batch([5, 0, 3])
    assert [prompt.row for prompt in batch] == [5, 0, 3]
    assert batch == [dataset[5], dataset[0], dataset[3]]
    assert "file 1 row 0" in tokenizer.decode(batch[2].prompt_ids)


@pytest.mark.parametrize("limit", [1, 3, 4, 99])
def test_max_samples_takes_the_first_rows(tmp_path, tokenizer, limit) -> None:
    files = [write(tmp_path / f"{n}.jsonl", [row(f"{n}.{i}") for i in range(3)]) for n in range(2)]
    dataset = PromptDataset(files, plan(), tokenizer, limit)
    assert [dataset[i].row for i in range(len(dataset))] == list(range(min(limit, 6)))


def test_template_arguments_reach_the_template_but_not_ours(tmp_path, tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", [row("hello")])
    shouting = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    shouting.chat_template = "{% for m in messages %}{{ m.content|upper if loud else m.content }}{% endfor %}"
    loud = PromptDataset([file], plan(apply_chat_template_kwargs={"loud": True}), shouting)
    assert shouting.decode(loud[0].prompt_ids) == "HELLO"
    with pytest.raises(ConfigError, match="tokenize"):
        PromptDataset([file], plan(apply_chat_template_kwargs={"tokenize": False}), tokenizer)


def test_a_template_that_refuses_a_row_names_it(tmp_path, tokenizer) -> None:
    strict = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    strict.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('users only') }}{% endif %}x"
    bad = row(prompt=[{"role": "system", "content": "be good"}])
    dataset = PromptDataset([write(tmp_path / "a.jsonl", [row(), bad])], plan(), strict)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*users only"):
        dataset.batch([0, 1])
    strict.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        PromptDataset([write(tmp_path / "a.jsonl", [row()])], plan(), strict)


@pytest.mark.parametrize("mode", ["error", "left", "right", "middle"])
@pytest.mark.parametrize("over", [0, 1, 7])
def test_the_cap_in_every_mode(tmp_path, tokenizer, mode, over) -> None:
    file = write(tmp_path / "a.jsonl", [row("a b c d e f g h i j k l m n o p"), row()])
    whole = PromptDataset([file], plan(), tokenizer)[0].prompt_ids
    cap = len(whole) - over
    dataset = PromptDataset([file], plan(max_prompt_length=cap, truncation=mode), tokenizer)
    if over == 0:
        assert dataset[0].prompt_ids == whole
    elif mode == "error":
        with pytest.raises(DataError, match=rf"a\.jsonl, line 1: .*{len(whole)} tokens.*max_prompt_length={cap}"):
            dataset[0]
    else:
        half = cap // 2
        expected = {
            "left": whole[over:],
            "right": whole[:cap],
            "middle": whole[:half] + whole[half + over :],
        }[mode]
        assert dataset[0].prompt_ids == expected
        assert len(expected) == cap


def test_filtering_drops_overlong_rows_counts_them_and_keeps_row_numbers(tmp_path, tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", [row("short"), row("long " * 50), row("exact fit"), row("long " * 60)])
    cap = len(PromptDataset([file], plan(), tokenizer)[2].prompt_ids)
    kept = PromptDataset([file], plan(max_prompt_length=cap, filter_overlong_prompts=True), tokenizer)
    assert kept.dropped == 2
    assert [prompt.row for prompt in kept.batch(range(len(kept)))] == [0, 2]
    assert [prompt.row for prompt in kept.of_rows([2, 0, 2])] == [2, 0, 2]
    with pytest.raises(DataError, match="data row 1 is not among the 2 rows"):
        kept.of_rows([0, 1])
    with pytest.raises(DataError, match="all 4 prompts"):
        PromptDataset([file], plan(max_prompt_length=1, filter_overlong_prompts=True), tokenizer)


def test_rows_are_tokenised_when_they_are_asked_for(tmp_path, tokenizer) -> None:
    """A row that cannot be tokenised does no harm until its turn."""
    strict = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    strict.chat_template = "{% if 'bad' in messages[0].content %}{{ raise_exception('bad') }}{% endif %}x"
    dataset = PromptDataset([write(tmp_path / "a.jsonl", [row(), row("bad")])], plan(), strict)
    assert dataset[0].row == 0


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (row(reward_model={"style": "rule", "ground_truth": None}), "no ground truth"),
        (row(reward_model={"style": "rule"}), "no ground truth"),
        (row(reward_model=None), "no ground truth"),
        (row(data_source=None), "data_source is None"),
        (row(prompt="just text"), "list of messages"),
        (row(prompt=[]), "list of messages"),
        (row(prompt=[{"role": "user"}]), "list of messages"),
        ({k: v for k, v in row().items() if k != "data_source"}, "no column 'data_source'"),
        ({k: v for k, v in row().items() if k != "reward_model"}, "no column 'reward_model'"),
        ({k: v for k, v in row().items() if k != "prompt"}, "no column 'prompt'.*data.prompt_key"),
        ([1, 2], "a row has to be an object"),
    ],
)
def test_every_row_is_checked_at_the_start_and_a_bad_one_is_named(tmp_path, tokenizer, bad, problem) -> None:
    file = write(tmp_path / "a.jsonl", [row(), row(), bad])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{problem}") as caught:
        PromptDataset([file], plan(), tokenizer)
    assert "\n" not in str(caught.value)


def test_bad_files_are_one_line(tmp_path, tokenizer) -> None:
    def problem(file: Path | str) -> str:
        with pytest.raises(DataError) as caught:
            PromptDataset([str(file)], plan(), tokenizer)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "missing" in problem(tmp_path / "none.parquet")
    assert "a folder" in problem(tmp_path)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    assert "not a readable parquet file" in problem(tmp_path / "torn.parquet")
    (tmp_path / "zero.parquet").touch()
    assert "not a readable parquet file" in problem(tmp_path / "zero.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert "no rows" in problem(tmp_path / "empty.parquet")
    (tmp_path / "empty.jsonl").touch()
    assert "no rows" in problem(tmp_path / "empty.jsonl")
    (tmp_path / "torn.json").write_text("[{")
    assert "not JSON" in problem(tmp_path / "torn.json")
    (tmp_path / "torn.jsonl").write_text("{}\n{")
    assert "line 2" in problem(tmp_path / "torn.jsonl")
    (tmp_path / "data.csv").write_text("a,b")
    assert ".parquet, .json or .jsonl" in problem(tmp_path / "data.csv")
