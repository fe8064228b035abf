"""Digests of model folders, tokenizers and data files."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from corral.config.plan import VllmPlan
from corral.errors import DataError
from corral.rollout.fingerprint import files_digest, fingerprint, folder_digest, tokenizer_digest
from tests.plans import tiny_plan

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "spiece.model",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "modeling_own.py", *TOKENIZER_FILES):
        (model / name).write_text(f"content of {name}")
    save_file({"w": torch.arange(100.0)}, model / "model.safetensors")
    return model


def test_a_copy_has_the_same_digests(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert folder_digest(copied) == folder_digest(folder)
    assert tokenizer_digest(copied) == tokenizer_digest(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "modeling_own.py", *TOKENIZER_FILES])
def test_a_changed_byte_added_or_removed_file_shows(folder: Path, name: str) -> None:
    model, tokenizer = folder_digest(folder), tokenizer_digest(folder)
    file = folder / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert folder_digest(folder) != model
    assert (tokenizer_digest(folder) != tokenizer) == (name in TOKENIZER_FILES)
    file.unlink()
    assert folder_digest(folder) != model


def test_notes_hidden_files_and_checkpoints_inside_do_not_count(folder: Path) -> None:
    before = folder_digest(folder)
    (folder / "README.md").write_text("hello")
    (folder / ".gitattributes").write_text("hello")
    (folder / ".hidden.json").write_text("{}")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "config.json").write_text("{}")
    assert folder_digest(folder) == before


def large_weights(folder: Path, value: float) -> Path:
    file = folder / "model.safetensors"
    save_file({"w": torch.full((8_000_000,), value)}, file)  # 32 MB: sampled, not read in full
    return file


def test_retrained_weights_and_another_layout_show_in_a_large_file(folder: Path) -> None:
    large_weights(folder, 1.0)
    before = folder_digest(folder)
    large_weights(folder, 1.0001)
    assert folder_digest(folder) != before
    save_file({"v": torch.full((8_000_000,), 1.0)}, folder / "model.safetensors")
    assert folder_digest(folder) != before
    large_weights(folder, 1.0)
    assert folder_digest(folder) == before


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_ends_of_a_large_file_are_read(folder: Path, place: str) -> None:
    file = large_weights(folder, 1.0)
    before = folder_digest(folder)
    with open(file, "r+b") as opened:
        opened.seek(-1 if place == "last" else 200, os.SEEK_END if place == "last" else os.SEEK_SET)
        opened.write(b"\x7f")
    assert folder_digest(folder) != before


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model folder .*/nowhere does not exist"):
        folder_digest(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no tokenizer files"):
        tokenizer_digest(tmp_path)


def test_data_files_count_by_content_and_order(tmp_path: Path) -> None:
    one, two, copied = (tmp_path / name for name in ("1.parquet", "2.parquet", "3.parquet"))
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    copied.write_bytes(b"one")
    assert files_digest([one, two]) == files_digest([str(copied), two])
    assert len({files_digest([one, two]), files_digest([two, one]), files_digest([one]), files_digest([])}) == 4


def test_a_plan_is_fingerprinted_by_what_its_samples_depend_on(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.parquet"
    data.write_bytes(b"rows")
    plan = tiny_plan(path=str(folder))
    plan = replace(plan, data=replace(plan.data, train_files=(str(data),)))
    base = fingerprint(plan)
    assert base == fingerprint(replace(plan, rollout=replace(plan.rollout, max_num_seqs=1, replicas=8, name="other")))
    sampling = plan.rollout.sampling
    vllm = VllmPlan("bfloat16", 0.5, None, True, True, True, False, 1024, 97, "dummy", {})
    changed = [
        replace(plan, rollout=replace(plan.rollout, vllm=vllm)),
        replace(plan, rollout=replace(plan.rollout, seed=1)),
        replace(plan, rollout=replace(plan.rollout, ignore_eos=True)),
        replace(plan, rollout=replace(plan.rollout, response_length=5)),
        replace(plan, rollout=replace(plan.rollout, prompt_length=5)),
        replace(plan, rollout=replace(plan.rollout, sampling=replace(sampling, temperature=0.5))),
        replace(plan, rollout=replace(plan.rollout, sampling=replace(sampling, n=2))),
        replace(plan, data=replace(plan.data, train_batch_size=4)),
        replace(plan, actor=replace(plan.actor, model=replace(plan.actor.model, override_config={"rope_theta": 5.0}))),
    ]
    for other in changed:
        assert base.differences(fingerprint(other))
    data.write_bytes(b"other rows")
    assert [item.split()[0] for item in base.differences(fingerprint(plan))] == ["data"]
