"""Which tokens end a response."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral.rollout.eos import eos_ids


def tokenizer(eos: int | None) -> SimpleNamespace:
    return SimpleNamespace(eos_token_id=eos)


@pytest.mark.parametrize(
    ("declared", "of_tokenizer", "wanted"),
    [
        (5, 5, (5,)),
        (5, 9, (5, 9)),
        ([9, 5], 9, (5, 9)),
        (None, 9, (9,)),
        ([5], None, (5,)),
        (None, None, ()),
        (0, 0, (0,)),
    ],
)
def test_ids_of_config_and_tokenizer_are_joined(
    declared: int | list[int] | None, of_tokenizer: int | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    assert eos_ids(SimpleNamespace(eos_token_id=declared), tokenizer(of_tokenizer)) == wanted
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert eos_ids(tmp_path, tokenizer(of_tokenizer)) == wanted
    assert eos_ids(str(tmp_path), tokenizer(of_tokenizer)) == wanted


def test_the_model_config_answers_where_the_generation_config_is_silent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert eos_ids(tmp_path, tokenizer(None)) == (1, 2)
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_ids(tmp_path, tokenizer(None)) == (1, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_ids(tmp_path, tokenizer(None)) == (7,)
