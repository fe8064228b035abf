"""Missing and broken inputs are named before anything starts."""

from __future__ import annotations

import pytest

from corral.errors import ConfigError, DataError

ARR = "actor_rollout_ref"


@pytest.mark.parametrize("key", [f"{ARR}.model.path", "critic.model.path"])
def test_missing_model_folder(plan_of, files, key):
    with pytest.raises(ConfigError, match=f"{key}={files}/absent is not a folder"):
        plan_of(f"{key}={files}/absent")


def test_a_folder_without_a_model(plan_of, files):
    (files / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no config\.json"):
        plan_of(f"{ARR}.model.path={files}/empty")
    (files / "empty" / "config.json").write_text("{half")
    with pytest.raises(DataError, match="is not JSON"):
        plan_of(f"{ARR}.model.path={files}/empty")
    (files / "empty" / "config.json").write_text("[]")
    with pytest.raises(DataError, match="holds no mapping"):
        plan_of(f"{ARR}.model.path={files}/empty")
    (files / "empty" / "config.json").unlink()
    (files / "empty" / "config.json").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        plan_of(f"{ARR}.model.path={files}/empty")


@pytest.mark.parametrize("key", [f"{ARR}.model", "critic.model"])
def test_a_number_of_the_model_that_is_none(plan_of, key):
    with pytest.raises(DataError, match=r"num_attention_heads is 'many', not a whole number"):
        plan_of(f"+{key}.override_config.num_attention_heads=many")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"prompt": 1}\n', "is not a parquet file"),
        (b"PAR1 cut short", "is not a complete parquet file"),
        (b"PAR1", "is not a complete parquet file"),
        (b"PAR1PAR1", "is not a complete parquet file"),
    ],
)
def test_broken_training_file(plan_of, files, content, said):
    (files / "train.parquet").write_bytes(content)
    with pytest.raises(DataError, match=f"data.train_files: {files}/train.parquet {said}"):
        plan_of()


def test_missing_training_file(plan_of, files):
    with pytest.raises(ConfigError, match=f"data.train_files: {files}/absent.parquet does not exist"):
        plan_of(f"data.train_files={files}/absent.parquet")
    with pytest.raises(ConfigError, match="name the data files one by one"):
        plan_of(f"data.train_files={files}")
    with pytest.raises(ConfigError, match="empty list"):
        plan_of("data.train_files=[]")


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_other_kinds_of_data_files(plan_of, files, name):
    (files / name).write_text('{"prompt": 1}\n')
    assert plan_of(f"data.train_files={files}/{name}").data.train_files == (f"{files}/{name}",)
    (files / name).write_text("")
    with pytest.raises(DataError, match="is empty"):
        plan_of(f"data.train_files={files}/{name}")


def test_every_file_of_a_list_is_checked(plan_of, files):
    with pytest.raises(ConfigError, match="absent"):
        plan_of(f"data.train_files=[{files}/train.parquet,{files}/absent.parquet]")


def test_validation_files_matter_when_set_or_needed(plan_of, files, monkeypatch):
    monkeypatch.setenv("HOME", str(files))  # the default path leads nowhere
    plan_of()
    for keys in (["trainer.test_freq=1"], ["trainer.val_only=True"], [f"data.val_files={files}/absent.parquet"]):
        with pytest.raises(ConfigError, match=r"data\.val_files"):
            plan_of(*keys)


def test_nothing_is_written(plan_of, files, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    plan_of("trainer.nnodes=2", "skip.rollout.enable=True", f"skip.rollout.dump_dir={files}/dump")
    assert sorted(files.rglob("*")) == before
